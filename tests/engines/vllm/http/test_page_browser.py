"""The page of a server in a browser, with real requests over a real socket. Only the engine is made up."""

import random
import threading
import time

import httpx
import pytest
import uvicorn

from kvmosaic.core.admin_key import ADMIN_KEY_VARIABLE
from tests.browser import browsing
from tests.engines.vllm.http.application import CHAT, ONE, chat, client_of, output

pytestmark = pytest.mark.long

KEY = "a-secret-of-many-letters"
TIERS = ("device", "device", "device", "host", "disk", "prefix-cache", None)


def made_up_output():
    """An output whose report has documents of all kinds."""
    at, chunks, marks = random.randrange(30, 400), [], []
    ratio = random.choice((0, 0, 0.15))
    for _ in range(random.randrange(3, 33)):
        end = at + random.randrange(100, 700)
        tier = random.choice(TIERS)
        chunk = {"span": {"start": at, "end": end}, "status": "cached" if tier else "prefilled", "tier": tier}
        chunks.append({**chunk, "reason": None if tier else "missing"})
        if ratio and tier:
            marks += [[at, at + 20], *([at + 50 + n * 35, at + 55 + n * 35] for n in range((end - at) // 40 - 2))]
        at = end + random.randrange(12)
    is_plain = random.random() < 0.2
    if is_plain:
        chunks = [{**chunk, "status": "prefilled", "tier": None, "reason": "not-stored"} for chunk in chunks]
        report = {"mode": "plain", "fallback_reason": "not-stored", "chunks": chunks}
    else:
        counts = {"prefix_tokens": chunks[0]["span"]["start"], "reused_tokens": at}
        report = {"mode": "reuse", "recompute_ratio": ratio, **counts, "recomputed": marks, "chunks": chunks}
    made = output(report, prompt_token_ids=list(range(at + 40)), request_id=f"chatcmpl-{random.randrange(10**9)}")
    made.metrics.first_token_latency = (at * 30e-6 if is_plain else 0.02 + at * 3e-6) * random.uniform(0.9, 1.3)
    return made


@pytest.fixture
def url(monkeypatch):
    """A server with a page."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)
    app = client_of(chunk_page=True, client_parameters="documents").app

    async def generate(params):
        yield made_up_output()

    app.state.engine_client.generate = generate
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def test_requests_appear_while_the_page_is_open(url, tmp_path):
    for _ in range(6):
        httpx.post(f"{url}{CHAT}", json=chat(ONE, "When?"))
    with browsing(tmp_path / "browser") as browser:
        browser.size(1240, 1100)
        browser.open(f"{url.replace('//', f'//me:{KEY}@')}/kvmosaic/")
        browser.wait_for("document.querySelectorAll('.row').length === 6")
        assert browser.value("document.getElementById('state').textContent") == "live"
        for _ in range(3):
            httpx.post(f"{url}{CHAT}", json=chat(ONE, "When?", stream=True))
        browser.wait_for("document.querySelectorAll('.row').length === 9")
        browser.value("document.querySelector('.row button.tile').click()")
        assert "1 of " in browser.value("document.querySelector('.row dl').textContent")
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            browser.screenshot(tmp_path / f"{scheme}.png")  # for people; pytest keeps them for a while
        assert browser.problems == []  # no violation of the policy


def test_without_the_key_there_is_nothing_to_see(url, tmp_path):
    httpx.post(f"{url}{CHAT}", json=chat(ONE, "When?"))
    refused = pytest.raises(AssertionError, match="INVALID_AUTH_CREDENTIALS")
    with browsing(tmp_path / "browser") as browser, refused:
        browser.open(f"{url.replace('//', '//me:wrong@')}/kvmosaic/")
