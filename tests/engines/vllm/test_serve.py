"""``kvmosaic serve`` as users run it: a server process, and the OpenAI client."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

import pytest
from openai import OpenAI

from tests.engines.vllm.helpers import DOCUMENTS, SEPARATOR, prompt

pytestmark = pytest.mark.engine

OPTIONS = "--dtype float32 --enforce-eager --enable-prompt-tokens-details --max-model-len"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with serving("smollm2-135m", 1024, tmp_path_factory.mktemp("serve") / "log") as client:
        yield client


@contextmanager
def serving(model, max_tokens, log):
    """A client of a server for ``model``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvmosaic.cli.main", "serve", model, "--enable-chunk-cache"]
    command += ["--client-parameters", "all", "--chunk-separator", SEPARATOR]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *OPTIONS.split(), str(max_tokens), "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        deadline = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(1)
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300)
    finally:
        server.terminate()
        server.wait(60)


def complete(client, text, **params):
    model = client.models.list().data[0].id
    return client.completions.create(
        model=model,
        prompt=text,
        max_tokens=8,
        temperature=0,
        logprobs=1,
        extra_body={"ignore_eos": True, "kv_transfer_params": params} if params else {"ignore_eos": True},
    )


def str_of_keys(params):
    return str(params)[:30]


def complete_raw(client, text, **params):
    """Like :func:`complete`, but without the client, whose JSON has no infinity, which ``1e999`` becomes in
    Python."""
    body = json.dumps(
        {
            "model": client.models.list().data[0].id,
            "prompt": text,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": params,
        }
    ).replace("Infinity", "1e999")
    url = f"{client.base_url}completions"
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=120).read())


def metrics(client):
    """Our metrics on vLLM's own endpoint."""
    url = str(client.base_url).replace("/v1/", "/metrics")
    lines = urllib.request.urlopen(url, timeout=10).read().decode().splitlines()
    series = (line.rpartition(" ") for line in lines if line.startswith("kvmosaic:"))
    return {re.sub(r'(model_name|engine)="[^"]*",?', "", name).replace(",}", "}"): float(v) for name, _, v in series}


def test_a_catalog_model_is_served_under_its_name(client):
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]


def test_second_request_reports_its_documents_as_cached(client, tokenizer):
    system, question = "You are helpful.", "Tell me about it. It is"
    first = complete(client, prompt(system, DOCUMENTS, question))
    before = metrics(client)
    second = complete(client, prompt("Quite another system prompt.", DOCUMENTS[::-1], question), report=True)
    cached = second.usage.prompt_tokens_details.cached_tokens
    report = second.model_extra["kv_transfer_params"]
    spans = [chunk["span"] for chunk in report["chunks"]]
    assert report["mode"] == "reuse"
    assert {chunk["status"] for chunk in report["chunks"]} == {"cached"}
    # All documents, with their separators, and nothing else.
    assert cached == report["reused_tokens"] == sum(span["end"] - span["start"] for span in spans)
    assert spans[0]["start"] == len(tokenizer("Quite another system prompt.").input_ids)
    assert first.usage.prompt_tokens_details is None or first.usage.prompt_tokens_details.cached_tokens == 0
    complete(client, "Something plain, so that a step brings the metrics of the one before: it is")
    after = metrics(client)
    grown = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    tier = next(name for name in grown if name.startswith("kvmosaic:chunk_hits_total"))
    assert grown[tier] == len(DOCUMENTS)
    assert grown['kvmosaic:requests_total{mode="reuse"}'] == 1
    assert grown['kvmosaic:requests_total{mode="plain"}'] == 1
    assert grown['kvmosaic:tokens_total{kind="reused"}'] == cached
    assert "kvmosaic:chunks_filled_total{}" not in grown
    assert grown['kvmosaic:stage_seconds_count{stage="remap"}'] == 1
    assert any(name.startswith("kvmosaic:tier_bytes") and after[name] > 0 for name in after)


@pytest.mark.parametrize(
    "params",
    [
        {"recompute_ratio": "lots"},
        {"recompute_ratio": 1.5},
        {"boundaries": [[0, 1e999], [1, 2]]},
        {"boundaries": [[0, 5.9], ["5", 9]]},
        {"boundaries": [[0, 3]] * 10_000},
        {"chunk_cache": "false"},
    ],
    ids=str_of_keys,
)
def test_bad_parameters_are_counted_and_answered_plainly(client, params):
    text = prompt("Be brief.", DOCUMENTS[:2])
    before = metrics(client)
    ours = complete_raw(client, text, **params, report=True)
    assert ours["kv_transfer_params"] == {"mode": "plain", "fallback_reason": "bad-parameters"}
    assert ours["choices"][0]["text"] == complete(client, text, chunk_cache=False).choices[0].text
    name = 'kvmosaic:fallbacks_total{reason="bad-parameters"}'
    assert metrics(client)[name] - before.get(name, 0) == 1


@pytest.mark.parametrize("sent", ["report", ["report"], 5, 0.5])
def test_parameters_that_are_no_object_end_nothing(client, sent):
    """Some releases of vLLM refuse them, others pass them on."""
    body = {"model": client.models.list().data[0].id, "prompt": "It is", "max_tokens": 2}
    extra = {"vllm_xargs": {"kv_transfer_params": sent}}
    url = f"{client.base_url}completions"
    request = urllib.request.Request(url, json.dumps(body | extra).encode(), {"Content-Type": "application/json"})
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=120).read()
    assert complete(client, "It is").choices[0].text


def test_ratio_one_is_plain_vllm(client):
    text = prompt("Be brief.", DOCUMENTS)
    exact = complete(client, text, recompute_ratio=1.0).choices[0]
    plain = complete(client, text, chunk_cache=False).choices[0]
    assert exact.text == plain.text
    assert exact.logprobs.token_logprobs == pytest.approx(plain.logprobs.token_logprobs, abs=1e-3)


def asked_about(client, documents):
    """How a question about documents was served, and the answer."""
    text = " # # ".join(["Answer in a word.", *documents, "Item 5 is kept in box"])
    answer = complete(client, text, report=True)
    return answer.kv_transfer_params["mode"], answer


@pytest.mark.long
def test_a_model_with_sliding_windows(tmp_path):
    """Documents longer than the window are stored only in part, and are reused in any order."""
    documents = [
        " ".join(f"{name} {number} is kept in box {(number * 7 + seed) % 97}." for number in range(90))
        for seed, name in enumerate(("Item", "Letter"))
    ]
    with serving("gemma-3-270m", 4096, tmp_path / "log") as client:
        for _ in range(30):  # until both documents are filled in the background
            mode, _ = asked_about(client, documents)
            if mode == "reuse":
                break
        mode, answer = asked_about(client, documents[::-1])
        assert mode == "reuse"
        reused = answer.usage.prompt_tokens_details.cached_tokens
        assert answer.usage.prompt_tokens > 1200
        assert reused > answer.usage.prompt_tokens * 0.9
        assert answer.choices[0].text.strip()
