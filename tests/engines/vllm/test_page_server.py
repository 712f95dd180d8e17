"""The page of a real server: its data about requests, none of which their clients see."""

import base64
import json
import urllib.error
import urllib.request

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.engines.vllm.archive import DOCUMENTS, QUESTION, system_prompt, user
from tests.engines.vllm.server import serving

pytestmark = [pytest.mark.engine, pytest.mark.long]

MODEL = "smollm2-135m"
KEY = "a secret of many letters"
RATIO = 0.2


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    settings = {"KVMOSAIC_MISS_POLICY": "fill-first", "KVMOSAIC_CHUNK_ADMIN_KEY": KEY}
    options = ("--max-model-len", "2048", "--chunk-page", "--admin-shows-text", "--recompute-ratio", str(RATIO))
    with serving(MODEL, tmp_path_factory.mktemp("serve") / "log", *options, **settings) as url:
        yield url


def openai(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)


def read(url, path):
    basic = base64.b64encode(f"me:{KEY}".encode()).decode()
    request = urllib.request.Request(f"{url}/kvmosaic/{path}", headers={"Authorization": f"Basic {basic}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def latest(url):
    return read(url, "requests")["requests"][-1]


def ask(url, documents, stream=False, **more):
    """Everything that a client sees of an answer. Each prompt begins differently, so that no prefix cache has it."""
    messages = [{"role": "system", "content": system_prompt()}, user([*documents, QUESTION])]
    answer = openai(url).chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, max_tokens=4, stream=stream, **more
    )
    return f"{answer.headers}{answer.text if not stream else answer.http_response.read()}"


@pytest.mark.parametrize("stream", [False, True])
def test_the_page_shows_what_clients_do_not_see(url, stream, tokenizer):
    documents = list(DOCUMENTS)
    ask(url, documents)
    for order in (documents[::-1], documents[1:] + documents[:1]):
        asks = {"extra_headers": {"x-kvmosaic": "report"}, "extra_body": {"kv_transfer_params": {"report": True}}}
        seen = ask(url, order, stream, **asks)
        assert "reused_tokens" not in seen
        assert '"kv_transfer_params":{' not in seen
        told = latest(url)
        report = told["report"]
        assert report["mode"] == "reuse"
        assert report["recompute_ratio"] == RATIO
        assert {chunk["status"] for chunk in report["chunks"]} == {"cached"}
        assert len(report["chunks"]) == len(documents)
        for text, document in zip(told["texts"], order, strict=True):
            assert text.strip() in document
        assert 0 < told["first_token_ms"] < 60_000
        assert told["prompt_tokens"] > sum(len(tokenizer(each).input_ids) for each in documents) * 0.9
        inside = [chunk["span"] for chunk in report["chunks"]]
        total = sum(span["end"] - span["start"] for span in inside)
        marked = sum(end - start for start, end in report["recomputed"])
        assert 0.05 * total < marked <= RATIO * total + 1  # the cost of choosing is part of the ratio
        for start, end in report["recomputed"]:
            assert any(span["start"] <= start < span["end"] for span in inside)
            assert end <= inside[-1]["end"]


def test_other_apis(url):
    answer = Anthropic(base_url=url, api_key="none").messages.with_raw_response.create(
        model=MODEL, messages=[user([*DOCUMENTS, QUESTION])], max_tokens=4
    )
    assert "reused_tokens" not in f"{answer.headers}{answer.text}"
    assert len(latest(url)["report"]["chunks"]) == len(DOCUMENTS)
    number = latest(url)["number"]
    plain = openai(url).completions.create(model=MODEL, prompt=f"{DOCUMENTS[0]} It is", max_tokens=3)
    assert plain.model_extra.get("kv_transfer_params") is None
    assert latest(url)["number"] == number + 1
    assert latest(url)["report"] == {"mode": "plain", "fallback_reason": None}


def test_numbers_are_those_of_the_metrics(url):
    ask(url, DOCUMENTS)
    stats = read(url, "stats")
    assert stats["model"] == MODEL
    assert stats["has_statistics"]
    assert sum(stats["counts"]["chunk_hits"].values()) > 0
    assert stats["counts"]["tokens"]["reused"] > 0
    assert stats["counts"]["tokens"]["recomputed"] > 0
    assert stats["tiers"]["host"]["bytes"] > 0
    assert stats["tiers"]["host"]["budget"] == 2 * 2**30
    assert stats["prompt_tokens"] > stats["counts"]["tokens"]["reused"] + stats["prefix_tokens"]


def test_nobody_gets_in_without_the_key(url):
    for path in ("", "requests", "stats"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/kvmosaic/{path}", timeout=60)
