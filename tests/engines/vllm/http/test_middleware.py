"""Requests through the middleware: documents are named, and nothing else changes."""

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from kvmosaic.core.limits import MAX_DOCUMENTS
from kvmosaic.core.sources import MAX_PARTS
from kvmosaic.engines.vllm.arguments import CONNECTOR
from kvmosaic.engines.vllm.http import request as request_module
from kvmosaic.vllm import ChunkMiddleware
from tests.engines.vllm.http.application import CHAT, ONE, TWO, chat, client_of, got, parameters

HALF = json.dumps(chat(f"{ONE} \ud800", "When?")).encode()
"""A body with half of a character, which JSON can contain and no encoding can express."""


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
    for sources in ("parts", "none", "auto"):
        client = client_of(chunk_separator="##", chunk_sources=sources)
        assert parameters(client, chat("When?")) == {"question": "When?"}


def test_where_a_user_typed_how_a_document_continues_is_told():
    longer = f"{ONE} It also leaves at noon, and carries cars."
    typed = "It also leaves at noon."
    body = chat(longer, ONE, typed)
    assert parameters(client_of(), body) == {"documents": [longer, ONE], "seams": [[ONE, typed]]}
    assert parameters(client_of(), chat(ONE, typed, kv_transfer_params={"documents": [longer]})) == {
        "documents": [longer, ONE],
        "seams": [[ONE, typed]],
    }
    mine = {"documents": [longer], "seams": []}
    assert parameters(client_of(), chat(ONE, typed, kv_transfer_params=mine))["seams"] == []


def test_documents_of_more_characters_than_any_prompt_has_are_not_named(monkeypatch):
    monkeypatch.setattr(request_module, "MAX_CHARACTERS", len(ONE) + len(TWO))
    assert parameters(client_of(), chat(ONE, TWO, "When?")) == {"documents": [ONE, TWO]}
    body = chat(ONE, f"{TWO}!", "When?")
    assert got(client_of(), body) == json.dumps(body).encode()


def test_there_are_never_more_names_than_the_engine_takes():
    texts = [f"This is document number {number}." for number in range(MAX_DOCUMENTS + 9)]
    assert parameters(client_of(), chat(*texts, "When?"))["documents"] == texts[:MAX_DOCUMENTS]
    sent = {"documents": texts[::-1][:MAX_DOCUMENTS]}
    assert parameters(client_of(), chat(*texts, "When?", kv_transfer_params=sent)) == sent


def test_where_too_many_questions_begin_nothing_is_named():
    """One of which the engine is not told could be the one whose user typed how a document continues."""
    longer = f"{ONE} It also leaves at noon, and carries {1000 * 'cars '}."
    asked = [message for number in range(MAX_DOCUMENTS) for message in chat(ONE, f"{number}?")["messages"]]
    body = {"messages": [*asked, *chat(ONE, "It also leaves at noon.")["messages"]]}
    named = {"documents": [longer]}
    assert parameters(client_of(), {**body, "kv_transfer_params": named}) == {"documents": []}
    few = {"messages": body["messages"][1:]}
    assert len(parameters(client_of(), {**few, "kv_transfer_params": named})["seams"]) == MAX_DOCUMENTS


EMPTY = [""] * MAX_PARTS


@pytest.mark.parametrize(
    "messages",
    [
        [{}] * MAX_PARTS,
        [{"role": "user", "content": EMPTY}],
        [{"role": "user", "content": [{"type": "tool_result", "content": EMPTY}]}],
        [{"role": "user", "content": [{"type": "document", "source": {"content": EMPTY}}]}],
        [{"type": "function_call_output", "output": EMPTY}],
        [{"role": "user", "content": [""]}] * (MAX_PARTS // 2),
    ],
)
def test_nothing_is_reused_in_a_request_of_too_many_parts(messages, monkeypatch):
    """A document could be found over the beginning of a question that nobody looked at."""
    body = {"messages": [*messages, *chat(ONE, "When?")["messages"]]}
    with monkeypatch.context() as patch:
        patch.setattr(request_module, "find_sources", None)
        patch.setattr(request_module, "find_seams", None)
        assert parameters(client_of(), body) == {"chunk_cache": False}
        sent = {"documents": [ONE], "recompute_ratio": 0.5}
        assert parameters(client_of(), {**body, "kv_transfer_params": sent}) == {**sent, "chunk_cache": False}
    few = {"messages": body["messages"][-1:]}
    assert parameters(client_of(), few) == {"documents": [ONE]}


def test_more_names_than_the_engine_takes_cost_no_time():
    asked = [message for number in range(MAX_DOCUMENTS) for message in chat("a", f"{number}?")["messages"]]
    body = json.dumps({"messages": asked, "kv_transfer_params": {"documents": [""] * 300_000}}).encode()
    begin = time.process_time()
    assert got(client_of(), body) == body
    assert time.process_time() - begin < 3


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
        made.pop("seams", None)  # a document may continue behind another one
        assert made == {**(sent or {}), "documents": made["documents"]}
        assert ONE in made["documents"]
