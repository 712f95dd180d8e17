"""The page of a server: who may see it, the data that it gets, and the data that clients never get."""

import base64
import json
import re
from urllib.parse import urljoin

import pytest
from prometheus_client import REGISTRY, Counter, Gauge

from kvmosaic.core.admin_key import ADMIN_KEY_VARIABLE, AdminKey
from kvmosaic.engines.vllm.http.page import PATHS
from kvmosaic.engines.vllm.http.recent import MAX_REQUESTS, SHOWN_TEXTS, SHOWN_TOKENS
from kvmosaic.engines.vllm.http.request import FIELDS
from kvmosaic.engines.vllm.parameters import PAGE_PARAMETER
from tests.engines.vllm.http.application import CHAT, ONE, chat, client_of, output

KEY = "a secret of many letters"
BEARER = {"Authorization": f"Bearer {KEY}"}
REPORT = {
    "mode": "reuse",
    "recompute_ratio": 0.0,
    "prefix_tokens": 0,
    "reused_tokens": 40,
    "chunks": [{"span": {"start": 20, "end": 60}, "status": "cached", "tier": "host", "reason": None}],
}


def basic(key, user="me"):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


@pytest.fixture
def page_client(monkeypatch):
    """Makes servers with a page."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)

    def make(**settings):
        client = client_of(**{"chunk_page": True, "client_parameters": "documents", **settings})
        client.app.state.engine_client.report = REPORT
        return client

    return make


def requests(client, seen=""):
    answer = client.get("/kvmosaic/requests", params={"seen": seen}, headers=BEARER)
    assert answer.status_code == 200
    return answer.json()


# --- access


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": KEY},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Basic"},
        {"Authorization": "Basic !!!"},
        basic(KEY[:-1]),
        basic(""),
        basic("", user=KEY),
        {"Authorization": basic(KEY)["Authorization"].replace("Basic", "Bearer")},
    ],
)
def test_without_the_key_nothing_is_shown(page_client, path, headers):
    client = page_client()
    client.post(CHAT, json=chat(ONE, "When?"))
    answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert list(answer.json()) == ["error"]
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("headers", [BEARER, basic(KEY), basic(KEY, user=""), basic(KEY, user="ü")])
def test_with_the_key_the_page_is_shown(page_client, headers):
    answer = page_client().get("/kvmosaic/", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.text.startswith("<!doctype html>")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
def test_without_the_slash_the_browser_is_sent_to_the_page(page_client, root):
    client = page_client()
    answer = client.get("/kvmosaic", headers=basic(KEY), follow_redirects=False)
    assert answer.status_code == 307
    assert urljoin(f"http://server{root}/kvmosaic", answer.headers["location"]) == f"http://server{root}/kvmosaic/"
    assert client.get("/kvmosaic", headers=basic(KEY)).text.startswith("<!doctype html>")


def test_a_key_with_a_colon_and_other_letters_opens_in_browsers(page_client, monkeypatch):
    key = "ein: Schlüssel aus vielen Wörtern"
    client = page_client()
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, key)
    assert client.get("/kvmosaic/stats", headers=basic(key)).status_code == 200


def test_a_browsers_key_changes_nothing(page_client):
    """Browsers also send the key with requests that other sites make."""
    client = page_client()
    for method, path in (("GET", "documents"), ("DELETE", "documents"), ("POST", "documents/delete")):
        answer = client.request(method, f"/kvmosaic/{path}", headers=basic(KEY), json={"text": ONE})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in PATHS:
        assert client.post(path, headers=basic(KEY)).status_code == 405


def test_there_is_no_page_by_default(page_client):
    client = page_client(chunk_page=False)
    assert {client.get(path, headers=BEARER).status_code for path in PATHS} == {404}
    assert client.post(CHAT, json=chat("When?")).status_code == 200
    assert "report" not in client.app.state.bodies[-1].decode()


def test_there_is_no_page_without_a_key_and_reports_stay_hidden(page_client, monkeypatch, caplog):
    monkeypatch.delenv(ADMIN_KEY_VARIABLE)
    client = page_client()
    assert {client.get(path).status_code for path in PATHS} == {404}
    assert client.post(CHAT, json=chat(ONE, kv_transfer_params={"report": True})).json() == {"outputs": 2}
    assert any(ADMIN_KEY_VARIABLE in record.getMessage() for record in caplog.records)


def test_a_page_loads_nothing_from_elsewhere(page_client):
    text = page_client().get("/kvmosaic/", headers=BEARER).text
    assert set(re.findall(r"https?://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.findall(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text)


# --- data for clients


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_clients_see_no_reports_that_they_may_not_have(page_client, path, stream, asked):
    client = page_client()
    asks = {} if asked is None else {"kv_transfer_params": {"report": asked, PAGE_PARAMETER: "mine"}}
    answer = client.post(path, json=chat(ONE, "When?", stream=stream) | asks, headers={"x-kvmosaic": "report"})
    sent = json.loads(client.app.state.bodies[-1])["kv_transfer_params"]
    assert sent[PAGE_PARAMETER] == AdminKey(KEY.encode()).page_pass
    assert sent.get("report") == asked
    assert "reused_tokens" not in answer.text + str(answer.headers)
    assert "kv_transfer_params" not in answer.text
    assert [each["report"] for each in requests(client)["requests"]] == [REPORT]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_clients_that_may_have_reports_get_them_if_they_ask(page_client, stream, asks):
    client = page_client(client_parameters="all")
    answer = client.post(CHAT, json=chat(ONE, stream=stream), headers={"x-kvmosaic": "report"} if asks else {})
    assert ("reused_tokens" in answer.text) is asks
    assert ("x-kvmosaic" in answer.headers) is (asks and not stream)
    assert len(requests(client)["requests"]) == 1


@pytest.mark.parametrize(("allowed", "is_told"), [("documents", False), ("all", True)])
def test_paths_that_are_not_followed(page_client, allowed, is_told):
    """On these paths, only clients themselves ask for reports."""
    client = page_client(client_parameters=allowed)
    body = {"kv_transfer_params": {"report": True}}
    client.get("/kvmosaic/")  # from here on outputs are watched
    assert ("kv_transfer_params" in client.post("/v1/embeddings", json=body).json()) is is_told
    assert len(requests(client)["requests"]) == 1


def test_a_wrong_parameter_stays_wrong(page_client):
    client = page_client()
    client.post(CHAT, json=chat(ONE, kv_transfer_params={"report": "yes"}))
    assert json.loads(client.app.state.bodies[-1])["kv_transfer_params"]["report"] == "yes"


# --- data for the page


def test_a_request_as_the_page_gets_it(page_client):
    client = page_client()
    client.post(CHAT, json=chat(ONE, "When?"))
    [told] = requests(client)["requests"]
    assert told.pop("time") > 1.7e9
    assert told == {
        "number": 1,
        "id": "chat-1",
        "prompt_tokens": 100,
        "cached_tokens": 12,
        "first_token_ms": 250.0,
        "report": REPORT,
    }


def test_only_new_requests_are_told_and_only_so_many_kept(page_client):
    client = page_client()
    for _ in range(MAX_REQUESTS + 5):
        client.post(CHAT, json=chat("When?"))
    told = requests(client)
    assert [each["number"] for each in told["requests"]] == list(range(6, MAX_REQUESTS + 6))
    process = told["process"]
    for seen, number in (
        (f"{process}.{MAX_REQUESTS + 3}", 2),
        (f"other.3,{process}.{MAX_REQUESTS + 5}", 0),
        (f"other.{MAX_REQUESTS}", MAX_REQUESTS),
        (f"{process}.x", MAX_REQUESTS),
        (f"{process}.-1", MAX_REQUESTS),
        (f"{process}.{'9' * 1000}", 0),
        (",,,..,", MAX_REQUESTS),
        ("a" * 50_000, MAX_REQUESTS),
    ):
        assert len(requests(client, seen)["requests"]) == number, seen[:50]


def test_texts_are_shown_only_where_that_is_allowed(page_client, smollm2_folder, tokenizer):
    tokens = tokenizer.encode("The ferry Cormorant connects Port Almery with Sill Island four times a day. " * 9)
    span = {"start": 3, "end": 90}
    many = [{"span": span, "status": "cached", "tier": "host", "reason": None}] * (SHOWN_TEXTS + 1)

    for allowed in (False, True):
        client = page_client(admin_shows_text=allowed)
        model = client.app.state.vllm_config.model_config
        model.tokenizer, model.tokenizer_revision = str(smollm2_folder), None
        model.trust_remote_code = model.skip_tokenizer_init = False

        async def generate(params):
            yield output({**REPORT, "chunks": many}, prompt_token_ids=tokens)

        client.app.state.engine_client.generate = generate
        client.post(CHAT, json=chat(ONE))
        [told] = requests(client)["requests"]
        if allowed:
            assert told["texts"] == [tokenizer.decode(tokens[3 : 3 + SHOWN_TOKENS])] * SHOWN_TEXTS
        else:
            assert "Cormorant" not in json.dumps(told)
            assert "texts" not in told


@pytest.mark.parametrize("report", [{"chunks": [{}]}, {"chunks": 5}, ["list"], "text"])
def test_a_report_that_cannot_be_shown_costs_its_place_only(page_client, report):
    client = page_client(admin_shows_text=True)
    client.app.state.engine_client.report = report
    assert client.post(CHAT, json=chat(ONE, "When?")).status_code == 200
    assert requests(client)["requests"] == []


@pytest.fixture
def no_series():
    """A registry without the series of earlier engines of this process."""
    others = set(REGISTRY._collector_to_names)
    for collector in others:
        REGISTRY.unregister(collector)
    yield
    for collector in set(REGISTRY._collector_to_names):
        REGISTRY.unregister(collector)
    for collector in others:
        REGISTRY.register(collector)


def test_statistics_of_all_engines_are_added_up(page_client, no_series):
    hits = Counter("kvmosaic:chunk_hits", "", ["engine", "tier"])
    tiers = Gauge("kvmosaic:tier_bytes", "", ["engine", "tier"])
    prompts = Counter("vllm:prompt_tokens", "", ["engine"])
    sources = Counter("vllm:prompt_tokens_by_source", "", ["engine", "source"])
    for engine in "01":
        hits.labels(engine, "host").inc(3)
        hits.labels(engine, "disk").inc(1)
        tiers.labels(engine, "host").set(500)
        prompts.labels(engine).inc(1000)
        for source in ("local_cache_hit", "local_compute"):
            sources.labels(engine, source).inc(70)
    stats = page_client(host_memory="1KiB").get("/kvmosaic/stats", headers=BEARER).json()
    for metric in (hits, tiers, prompts, sources):
        REGISTRY.unregister(metric)
    assert stats["model"] == "m"
    assert stats["counts"]["chunk_hits"] == {"host": 6, "disk": 2}
    assert stats["tiers"] == {"host": {"bytes": 1000, "budget": 1024}}
    assert (stats["prompt_tokens"], stats["prefix_tokens"], stats["has_statistics"]) == (2000, 140, True)
    assert page_client().get("/kvmosaic/stats", headers=BEARER).json()["has_statistics"] is False
