"""Answers through the middleware: clients that ask for a report get it in a header or at the end of a stream."""

import asyncio
import json

import httpx

from kvmosaic.engines.vllm.http.answer import header_value
from kvmosaic.engines.vllm.http.report import ReportNote, keep_report
from tests.engines.vllm.http.application import CHAT, ONE, REPORT, chat, client_of, output, parameters


def test_a_report_comes_as_a_header():
    client = client_of()
    for body, headers in (
        (chat(ONE, "When?", kv_transfer_params={"report": True}), {}),
        (chat(ONE, "When?"), {"X-KVMosaic": "report"}),
    ):
        answer = client.post(CHAT, json=body, headers=headers)
        assert answer.json() == {"outputs": 2, "kv_transfer_params": REPORT}
        assert json.loads(answer.headers["x-kvmosaic"]) == {
            "mode": "fill",
            "reused_tokens": 12,
            "chunks": {"cached": 2, "filled": 1},
        }
        sent = json.loads(client.app.state.bodies[-1])["kv_transfer_params"]
        assert sent == {"documents": [ONE], "report": True}


def test_recomputed_tokens_are_counted_in_the_header():
    assert json.loads(header_value({"mode": "reuse", "recomputed": [[3, 9], [20, 21]]}))["recomputed"] == 7


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
        outputs = engine.generate({"report": True})
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
        yield output({"mode": f"number {number}"})

    async def ask_all():
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            asked = (http.post(CHAT, json=chat("When?"), headers={"x-kvmosaic": "report"}) for _ in range(9))
            return await asyncio.gather(*asked)

    client.app.state.engine_client.generate = generate
    modes = [json.loads(answer.headers["x-kvmosaic"])["mode"] for answer in asyncio.run(ask_all())]
    assert sorted(modes) == [f"number {number}" for number in range(9)]
