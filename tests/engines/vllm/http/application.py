"""A real application behind the middleware. It answers as vLLM's server does, without an engine."""

import json
from types import SimpleNamespace

from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from vllm.config import KVTransferConfig

from kvmosaic.engines.vllm.arguments import CONNECTOR
from kvmosaic.engines.vllm.http.request import FIELDS
from kvmosaic.engines.vllm.parameters import PAGE_PARAMETER
from kvmosaic.vllm import ChunkMiddleware

CHAT = "/v1/chat/completions"
ONE, TWO = "The ferry leaves at 6:40 in summer.", "The bakery is closed on Mondays."
REPORT = {
    "mode": "fill",
    "reused_tokens": 12,
    "chunks": [{"status": status, "tier": None} for status in ("cached", "cached", "filled")],
}


def output(params, **fields):
    """An output of an engine, as vLLM's server receives it."""
    usual = {"request_id": "chat-1", "prompt_token_ids": list(range(100)), "num_cached_tokens": 12}
    metrics = SimpleNamespace(first_token_latency=0.25)
    return SimpleNamespace(**{**usual, "metrics": metrics, "kv_transfer_params": params, **fields})


class Engine:
    """The engine as an API server sees it. Every request gets two outputs, the last one with a report if it was asked
    for."""

    def __init__(self):
        self.report = REPORT
        self.is_closed = False

    async def generate(self, params, *args, **kwargs):
        is_asked = isinstance(params, dict) and (params.get("report") is True or PAGE_PARAMETER in params)
        try:
            yield output(None)
            yield output(self.report if is_asked else None)
        finally:
            self.is_closed = True


def client_of(connector=CONNECTOR, **settings):
    """A client of a server that answers as vLLM does, and keeps the requests it got in ``app.state.bodies``."""

    async def answer(request):
        body = await request.body()
        request.app.state.bodies.append(body)
        request.app.state.lengths.append(request.headers.get("content-length"))
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return JSONResponse({"error": "no JSON"}, 400)
        params = fields.get("kv_transfer_params") if isinstance(fields, dict) else None
        generator = request.app.state.engine_client.generate(params)
        if not isinstance(fields, dict) or not fields.get("stream"):
            outputs = [output async for output in generator]
            told = {"outputs": len(outputs)}
            if outputs[-1].kv_transfer_params is not None:
                told["kv_transfer_params"] = outputs[-1].kv_transfer_params
            return JSONResponse(told)
        return StreamingResponse(events(generator, request.url.path), media_type="text/event-stream")

    async def events(generator, path):
        async for _ in generator:
            if path == "/v1/messages":
                yield 'event: message_delta\ndata: {"type": "message_delta"}\n\n'
            else:
                yield 'data: {"id": "chat-1", "object": "chunk", "created": 5, "model": "m", "choices": [{}]}\n\n'
        yield (
            'event: message_stop\ndata: {"type": "message_stop"}\n\n'
            if path == "/v1/messages"
            else "data: [DONE]\n\n"
        )

    app = Starlette(routes=[Route(path, answer, methods=["POST"]) for path in (*FIELDS, "/v1/embeddings")])
    app.add_middleware(ChunkMiddleware)
    settings = {"enable_chunk_cache": True, "chunk_separator": None, "client_parameters": "all"} | settings
    transfer = connector and KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=settings
    )
    app.state.vllm_config = SimpleNamespace(
        kv_transfer_config=transfer, model_config=SimpleNamespace(model="no-such-model", served_model_name="m")
    )
    app.state.engine_client = Engine()
    app.state.bodies, app.state.lengths = [], []
    return TestClient(app)


def chat(*parts, **more):
    content = [{"type": "text", "text": part} for part in parts]
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def got(client, body, path=CHAT, **headers):
    """The bytes of a request that the server received."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    client.post(path, content=body, headers=headers)
    assert client.app.state.lengths[-1] == str(len(client.app.state.bodies[-1]))
    return client.app.state.bodies[-1]


def parameters(client, body, path=CHAT, **headers):
    return json.loads(got(client, body, path, **headers)).get("kv_transfer_params")
