"""The middleware in front of a real application, without an engine."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from vllm.config import KVTransferConfig

from kvmosaic.core.limits import MAX_DOCUMENTS
from kvmosaic.engines.vllm.arguments import CONNECTOR
from kvmosaic.engines.vllm.http import request as request_module
from kvmosaic.engines.vllm.http.report import ReportNote, keep_report
from kvmosaic.engines.vllm.http.request import FIELDS
from kvmosaic.vllm import ChunkMiddleware

CHAT = "/v1/chat/completions"
ONE, TWO = "The ferry leaves at 6:40 in summer.", "The bakery is closed on Mondays."
REPORT = {
    "mode": "fill",
    "reused_tokens": 12,
    "chunks": [{"status": status, "tier": None} for status in ("cached", "cached", "filled")],
}
OUTPUTS = [SimpleNamespace(kv_transfer_params=None), SimpleNamespace(kv_transfer_params=REPORT)]


class Engine:
    """What an API server has of an engine: all requests get two outputs, of which the last has a report."""

    def __init__(self):
        self.is_closed = False

    async def generate(self, *args, **kwargs):
        try:
            for output in OUTPUTS:
                yield output
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
        generator = request.app.state.engine_client.generate("prompt", None, "id")
        if not isinstance(fields, dict) or not fields.get("stream"):
            return JSONResponse({"outputs": len([output async for output in generator])})
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
        kv_transfer_config=transfer, model_config=SimpleNamespace(model="no-such-model")
    )
    app.state.engine_client = Engine()
    app.state.bodies, app.state.lengths = [], []
    return TestClient(app)


def chat(*parts, **more):
    content = [{"type": "text", "text": part} for part in parts]
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def got(client, body, path=CHAT, **headers):
    """The bytes that the server got of a request."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    client.post(path, content=body, headers=headers)
    assert client.app.state.lengths[-1] == str(len(client.app.state.bodies[-1]))
    return client.app.state.bodies[-1]


def parameters(client, body, path=CHAT, **headers):
    return json.loads(got(client, body, path, **headers)).get("kv_transfer_params")


# --- requests

HALF = json.dumps(chat(f"{ONE} \ud800", "When?")).encode()
"""A body with half of a character, which JSON can write and nobody can encode."""


def test_documents_are_named_and_all_other_bytes_stay():
    body = (
        b' {\n "temperature" : 1.00e0, "seed": 123456789012345678901234567890, "messages":[{"role":"user","content":['
    )
    body += (
        b'{"type":"text","text":"The ferry leaves at 6:40 in \\u0073ummer."},{"type":"text","text":"When?"}]}] }\n'
    )
    spliced = got(client_of(), body)
    added = b'"kv_transfer_params":{"documents":["%s"]},' % ONE.encode()
    assert spliced == body.replace(b"{", b"{" + added, 1)


def test_a_request_without_documents_is_not_touched():
    for body in (chat("When?"), chat("short", "When?"), {"messages": [{"role": "user", "content": ONE}]}, {}, []):
        assert got(client_of(), body) == json.dumps(body).encode()


def test_names_of_the_client_come_first_and_its_other_parameters_stay():
    client = client_of(chunk_separator=" # # ")
    sent = {"documents": [f" {ONE}"], "recompute_ratio": 0.25, "theirs": {"a": [1]}}
    assert parameters(client, chat(ONE, TWO, "When? ", kv_transfer_params=sent)) == {
        **sent,
        "documents": [f" {ONE}", TWO],
        "question": "When?",
    }
    mine = {"question": "Who?"}
    assert parameters(client, chat("When?", kv_transfer_params=mine)) == mine


def test_numbers_that_only_the_server_can_read_stay():
    body = json.dumps(chat(ONE, "When?", kv_transfer_params={"theirs": "N"})).replace('"N"', "1e999").encode()
    assert b"1e999" in got(client_of(), body)
    assert parameters(client_of(), body)["documents"] == [ONE]


@pytest.mark.parametrize(
    "sent",
    [5, "report", [], {"documents": "one"}, {"documents": [5]}, {"chunk_cache": False}, {"boundaries": [[0, 1]]}],
    ids=str,
)
def test_parameters_that_leave_no_room_for_documents_are_not_touched(sent):
    body = chat(ONE, TWO, "When?", kv_transfer_params=sent)
    assert got(client_of(), body) == json.dumps(body).encode()


def test_no_parameters_may_also_be_written_as_null():
    assert parameters(client_of(), chat(ONE, "When?", kv_transfer_params=None)) == {"documents": [ONE]}


def test_the_question_is_told_only_where_separators_count():
    assert parameters(client_of(), chat(ONE, "When?")) == {"documents": [ONE]}
    assert parameters(client_of(chunk_separator="##"), chat("When?")) == {"question": "When?"}


def test_there_are_never_more_names_than_the_engine_takes():
    texts = [f"This is document number {number}." for number in range(MAX_DOCUMENTS + 9)]
    assert parameters(client_of(), chat(*texts, "When?"))["documents"] == texts[:MAX_DOCUMENTS]
    sent = {"documents": texts[::-1][:MAX_DOCUMENTS]}
    assert parameters(client_of(), chat(*texts, "When?", kv_transfer_params=sent)) == sent


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", chat(ONE, "When?")),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in (ONE, "?")]}]},
        ),
    ],
)
def test_other_paths(path, body):
    assert parameters(client_of(), body, path) == {"documents": [ONE]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_paths_without_conversations(path):
    body = {**chat(ONE, "When?"), "documents": [TWO]}
    assert got(client_of(), body, path) == json.dumps(body).encode()


@pytest.mark.parametrize(
    ("connector", "settings"),
    [
        (None, {}),
        ("OtherConnector", {}),
        (CONNECTOR, {"chunk_sources": "none"}),
        (CONNECTOR, {"chunk_sources": "auto"}),
    ],
)
def test_without_chunk_cache_or_sources_nothing_is_named(connector, settings):
    client = client_of(connector, **settings)
    assert got(client, chat(ONE, "When?")) == json.dumps(chat(ONE, "When?")).encode()


def test_each_source_can_be_switched_off():
    body = chat(ONE, "When?", documents=[TWO])
    assert parameters(client_of(chunk_sources="documents"), body)["documents"] == [TWO]
    assert parameters(client_of(chunk_sources="parts"), body)["documents"] == [ONE]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nothing", b'{"messages": [' + b"[" * 10**5, b'{"a": "\xff"}', b"\xff\xfe{\x00", HALF]
)
def test_what_is_no_json_reaches_the_server_as_it_is(body):
    assert got(client_of(), body) == body


def test_large_bodies_pass_untouched(monkeypatch):
    monkeypatch.setattr(request_module, "MAX_BODY", 300)
    assert parameters(client_of(), chat(ONE, "When?")) == {"documents": [ONE]}
    body = json.dumps(chat(ONE, "When?" * 100)).encode()
    assert got(client_of(), body) == body
    pieces = [body[start : start + 50] for start in range(0, len(body), 50)]
    client = client_of()
    client.post(CHAT, content=iter(pieces))
    assert client.app.state.bodies == [body]


def test_bodies_come_in_pieces():
    body = json.dumps(chat(ONE, "When?")).encode()
    client = client_of()
    client.post(CHAT, content=(body[start : start + 7] for start in range(0, len(body), 7)))
    assert json.loads(client.app.state.bodies[0])["kv_transfer_params"] == {"documents": [ONE]}


def test_nothing_is_read_of_a_request_that_the_server_refuses():
    statuses = []

    async def refuse(scope, receive, send):
        await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)

    async def receive():
        raise AssertionError("it was read")

    async def send(message):
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": client_of().app}
    asyncio.run(ChunkMiddleware(refuse)(scope, receive, send))
    assert statuses[0] == 401


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(max_size=5) | st.sampled_from(["kv_transfer_params", "documents"]), JSON, max_size=4),
    st.booleans(),
)
def test_no_other_field_ever_changes(fields, is_ascii):
    client = client_of()
    body = json.dumps({**fields, **chat(ONE, "When?")}, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    before, after = json.loads(body), json.loads(got(client, body))
    sent, made = before.pop("kv_transfer_params", None), after.pop("kv_transfer_params", None)
    assert before == after
    if not isinstance(sent, dict | None):
        assert made == sent
    elif (sent or {}).get("documents") is None:
        assert made == {**(sent or {}), "documents": made["documents"]}
        assert ONE in made["documents"]


# --- reports


def test_a_report_comes_as_a_header():
    client = client_of()
    for body, headers in (
        (chat(ONE, "When?", kv_transfer_params={"report": True}), {}),
        (chat(ONE, "When?"), {"X-KVMosaic": "report"}),
    ):
        answer = client.post(CHAT, json=body, headers=headers)
        assert answer.json() == {"outputs": 2}
        assert json.loads(answer.headers["x-kvmosaic"]) == {
            "mode": "fill",
            "reused_tokens": 12,
            "chunks": {"cached": 2, "filled": 1},
        }
        sent = json.loads(client.app.state.bodies[-1])["kv_transfer_params"]
        assert sent == {"documents": [ONE], "report": True}


def test_the_header_alone_adds_a_parameter():
    client = client_of(chunk_sources="none")
    assert parameters(client, {}, "/v1/completions", **{"x-kvmosaic": "report"}) == {"report": True}
    sent = {"report": False}
    assert parameters(client, {"kv_transfer_params": sent}, **{"x-kvmosaic": "report"}) == sent


def test_nobody_gets_a_report_without_asking_or_where_it_is_not_allowed():
    asks = chat(ONE, "When?", kv_transfer_params={"report": True})
    for client, body in ((client_of(), chat(ONE, "When?")), (client_of(client_parameters="documents"), asks)):
        assert "x-kvmosaic" not in client.post(CHAT, json=body).headers
        streamed = client.post(CHAT, json={**body, "stream": True}).text
        assert streamed.count("data:") == 3
        assert "kvmosaic" not in streamed
        assert "kv_transfer_params" not in streamed


def test_a_stream_ends_with_a_chunk_that_has_the_report():
    answer = client_of().post(CHAT, json=chat(ONE, "When?", stream=True), headers={"x-kvmosaic": "report"})
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    assert json.loads(events[-3]) == {
        "id": "chat-1",
        "object": "chunk",
        "created": 5,
        "model": "m",
        "choices": [],
        "kv_transfer_params": REPORT,
    }
    assert len(events) == 5
    assert "x-kvmosaic" not in answer.headers


def test_other_streams_end_with_a_comment():
    body = chat(ONE, "When?", stream=True, kv_transfer_params={"report": True})
    answer = client_of().post("/v1/messages", json=body)
    *events, comment, end = answer.text.split("\n\n")
    assert end == ""
    assert events[-1].startswith("event: message_stop")
    assert json.loads(comment.removeprefix(": kvmosaic ")) == REPORT


def test_who_stops_listening_ends_the_request_at_once():
    """vLLM aborts a request when the generator of its outputs is closed."""
    client = client_of()
    client.post(CHAT, json=chat("When?"))  # from here on outputs are watched
    engine = client.app.state.engine_client
    engine.is_closed = False

    async def listen_once():
        note = ReportNote()
        note.is_asked_for = True
        keep_report(note)
        outputs = engine.generate()
        await outputs.__anext__()
        assert not engine.is_closed
        await outputs.aclose()
        assert engine.is_closed

    asyncio.run(listen_once())


def test_reports_of_requests_at_the_same_time_are_kept_apart():
    client = client_of()
    numbers = iter(range(9))

    async def generate(*args, **kwargs):
        number = next(numbers)
        await asyncio.sleep(0.01)
        yield SimpleNamespace(kv_transfer_params={"mode": f"number {number}"})

    async def ask_all():
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            asked = (http.post(CHAT, json=chat("When?"), headers={"x-kvmosaic": "report"}) for _ in range(9))
            return await asyncio.gather(*asked)

    client.app.state.engine_client.generate = generate
    modes = [json.loads(answer.headers["x-kvmosaic"])["mode"] for answer in asyncio.run(ask_all())]
    assert sorted(modes) == [f"number {number}" for number in range(9)]
