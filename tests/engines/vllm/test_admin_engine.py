"""Stored documents of a real engine, managed over HTTP."""

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from kvmosaic.core.admin_key import AdminKey
from kvmosaic.core.config import load_config
from kvmosaic.engines.vllm.arguments import engine_arguments
from kvmosaic.engines.vllm.http.admin import AdminApp
from tests.engines.vllm.helpers import DOCUMENTS, SMALL

pytestmark = pytest.mark.engine

KEY = "a secret of many letters"


class Server:
    """An engine behind the admin application, and clients of both."""

    def __init__(self, loop, engine):
        self.loop, self.engine = loop, engine
        state = SimpleNamespace(vllm_config=engine.vllm_config, engine_client=engine)
        self._app, self._admin = SimpleNamespace(state=state), AdminApp(AdminKey(KEY.encode()))

    async def __call__(self, scope, receive, send):
        await self._admin({**scope, "app": self._app}, receive, send)

    def __getattr__(self, method):
        def ask(path="", **sent):
            return self.loop.run_until_complete(self._asked(method, path, sent))

        return ask

    async def _asked(self, method, path, sent):
        transport = httpx.ASGITransport(self)
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=200) as browser:
            answer = await browser.request(method, f"/kvmosaic/documents{path}", headers=headers, **sent)
            return answer.status_code, answer.json()

    def complete(self, text, documents):
        """The report to a client that names documents."""

        async def complete():
            params = {"documents": documents, "report": True}
            sampling = SamplingParams(max_tokens=2, temperature=0, extra_args={"kv_transfer_params": params})
            prompt = {"prompt_token_ids": self.engine.get_tokenizer().encode(text)}
            outputs = self.engine.generate(prompt, sampling, request_id=f"client {text[:20]}")
            return [output.kv_transfer_params async for output in outputs][-1]

        return self.loop.run_until_complete(complete())

    def listed(self):
        status, answer = self.get("")
        assert status == 200
        return {each["hash"]: each for each in answer["documents"] if each["kind"] == "document"}


@contextmanager
def serving(model, **settings):
    config = load_config(enable_chunk_cache=True, client_parameters="all", chunk_separator=None, **settings)
    loop = asyncio.new_event_loop()

    async def start():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **SMALL, **engine_arguments(config)))

    engine = loop.run_until_complete(start())
    try:
        yield Server(loop, engine)
    finally:
        engine.shutdown()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


@pytest.fixture(scope="module")
def server(tiny_text, tmp_path_factory):
    with serving(tiny_text, admin_shows_text=True, disk_path=tmp_path_factory.mktemp("disk")) as server:
        yield server


def test_the_life_of_a_document(server):
    first, second = DOCUMENTS[:2]
    status, filled = server.post(json={"text": first})
    assert (status, filled["state"]) == (200, "filled")
    assert server.post(json={"text": first}) == (200, {**filled, "state": "known"})
    digest = filled["hash"]
    listed = server.listed()
    assert (listed[digest]["tokens"], listed[digest]["hits"], listed[digest]["pinned"]) == (
        filled["tokens"],
        0,
        False,
    )
    assert 0 <= listed[digest]["age_s"] < 100
    assert listed[digest]["tier"] == "host"

    told = server.complete(f"Answer briefly.\nSource 1: {first}\n\nWhere does the ferry go?", [first])
    assert (told["mode"], [chunk["status"] for chunk in told["chunks"]]) == ("reuse", ["cached"])
    assert server.listed()[digest]["hits"] == 1

    assert server.post(f"/{digest}/pin") == (200, {"hash": digest, "pinned": True})
    assert server.listed()[digest]["pinned"]
    assert server.post(f"/{digest}/unpin") == (200, {"hash": digest, "pinned": False})
    assert not server.listed()[digest]["pinned"]

    assert server.delete(f"/{digest}") == (200, {"hash": digest, "deleted": True})
    assert digest not in server.listed()
    assert server.delete(f"/{digest}")[0] == 404
    told = server.complete(f"Answer at length.\nSource 1: {first}\n\nWhere does the ferry go?", [first])
    assert (told["mode"], told["fallback_reason"]) == ("plain", "not-stored")  # the scheduler also knows it

    other = server.post(json={"text": second})[1]["hash"]
    assert server.post("/delete", json={"text": second}) == (200, {"hash": other, "deleted": True})
    assert server.post("/delete", json={"text": second})[0] == 404


def test_texts_are_shown_where_that_is_allowed(server):
    server.post(json={"text": DOCUMENTS[2]})
    status, answer = server.get("?text=1&limit=1")
    assert (status, len(answer["documents"])) == (200, 1)
    assert answer["entries"] >= 1
    [shown] = answer["documents"]
    assert "first_tokens" not in shown
    assert shown["text"].strip() in DOCUMENTS[2]
    assert len(shown["text"].strip()) > 5


def test_a_document_that_takes_several_steps_to_fill(server):
    long = " ".join(f"{number}. {document}" for number, document in enumerate(DOCUMENTS * 10))[:4000]
    status, answer = server.post(json={"text": long})
    assert (status, answer["state"]) == (200, "filled")
    assert answer["tokens"] > 500


def test_everything_is_deleted_also_from_disk_and_vllms_own_cache(server):
    server.post(json={"text": DOCUMENTS[3]})
    assert server.listed()
    assert server.delete("") == (200, {"cleared": True, "prefix_cache_cleared": True})
    status, answer = server.get("")
    assert (status, answer) == (200, {"entries": 0, "bytes": 0, "documents": []})
    assert server.post(json={"text": DOCUMENTS[3]})[1]["state"] == "filled"
