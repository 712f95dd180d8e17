"""Which texts of a request are documents, for every API and for any JSON."""

import random
import time
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.limits import MAX_DOCUMENTS
from kvmosaic.core.sources import MAX_LOOKS, Sources, find_seams, find_sources

ALL = ("documents", "parts", "tools")


def found(body, wanted=ALL, min_length=1, most=MAX_DOCUMENTS):
    return find_sources(body, wanted, min_length, most)


def text(words, kind="text"):
    return {"type": kind, "text": words}


def user(*parts):
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


# --- chat completions


def test_parts_of_the_last_user_message_are_documents_but_for_the_last():
    body = {"messages": [{"role": "system", "content": "Be brief."}, user("one", "two", "why?")]}
    assert found(body) == Sources(("one", "two"), "why?")


def test_texts_are_neither_documents_nor_questions():
    assert found({"messages": [{"role": "user", "content": "one, two, why?"}]}) == Sources()


def test_what_a_text_is_does_not_change_as_the_conversation_goes_on():
    """Otherwise vLLM's prefix cache would not find in one turn the blocks that were blended in the turn before."""
    messages = [user("one", "first?")]
    assert found({"messages": messages}) == Sources(("one",), "first?")
    messages += [{"role": "assistant", "content": [text("an answer")]}, user("two", "second?")]
    assert found({"messages": messages}) == Sources(("one", "two"), "second?")
    messages += [{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "three"}]
    assert found({"messages": messages}) == Sources(("one", "two", "three"), "second?")


@pytest.mark.parametrize("role", ["user", "human", None])
@pytest.mark.parametrize(
    "after",
    [
        [],
        [{"role": "user", "content": "and why?"}],
        [{"role": "user", "content": [text("and why?")]}],
        [{"role": "user", "content": [text("two"), text("and why?")]}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "and why?"}],
    ],
)
def test_a_question_without_an_answer_stays_a_question(role, after):
    asked = {**user("one", "first?"), "role": role}
    for field in ("messages", "input"):
        assert "first?" not in found({field: [asked, *after]}).documents
        assert found({field: [asked, *after]}).documents[0] == "one"


def test_the_first_part_of_the_system_prompt_is_no_document():
    body = {"messages": [{"role": "system", "content": [text("Be brief."), text("one")]}, user("why?")]}
    assert found(body) == Sources(("one",), "why?")


def test_the_last_text_is_the_question_also_before_an_image():
    body = {"messages": [user("one", "what is this?", {"type": "image_url", "image_url": {"url": "data:"}})]}
    assert found(body) == Sources(("one",), "what is this?")


@pytest.mark.parametrize("role", ["tool", "function"])
@pytest.mark.parametrize("content", ["one", [text("one")], ["one"]])
def test_tool_results_are_documents(role, content):
    body = {"messages": [user("why?"), {"role": role, "content": content}]}
    assert found(body) == Sources(("one",), "why?")


@pytest.mark.parametrize(
    "documents",
    [
        ["one", "two"],
        [{"text": "one"}, {"text": "two"}],
        [{"contents": "one"}, {"content": "two", "score": 0.5}],
        [{"id": 1, "data": {"snippet": "one"}}, {"page_content": "two"}],
    ],
)
def test_the_field_for_documents(documents):
    assert found({"documents": documents, "messages": []}).documents == ("one", "two")


# --- messages


def test_blocks_of_the_messages_api():
    documents = [
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}, "title": "no"},
        {"type": "document", "source": {"type": "content", "content": [text("two")]}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "no"}},
        {"type": "search_result", "source": "https://no", "title": "no", "content": [text("three")]},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "four"},
        {"type": "tool_result", "tool_use_id": "2", "content": [text("five"), {"type": "image"}]},
    ]
    body = {
        "system": [text("Be brief."), text("zero")],
        "messages": [user("why?"), {"role": "assistant", "content": [text("no")]}, user(*documents, *results)],
    }
    assert found(body) == Sources(("zero", "one", "two", "three", "four", "five"), "why?")
    assert found(body, ["documents"]).documents == ("one", "two", "three")
    assert found(body, ["tools"]).documents == ("four", "five")
    assert found(body, ["parts"]).documents == ("zero",)
    assert found(body, []) == Sources((), "why?")


# --- responses


def test_items_of_the_responses_api():
    content = [text(words, "input_text") for words in ("one", "two", "why?")]
    body = {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": content},
            {"type": "message", "role": "assistant", "content": [text("no", "output_text")]},
            {"type": "function_call", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "three"},
            {"type": "function_call_output", "call_id": "2", "output": [text("four", "input_text")]},
        ]
    }
    assert found(body) == Sources(("one", "two", "three", "four"), "why?")
    assert found({"input": "why?"}) == Sources()


# --- names


def test_names_have_no_blanks_around_them_and_come_once():
    assert found({"messages": [user(" one\n", "one", "o", "two", "why? ")]}, min_length=2).documents == ("one", "two")


@pytest.mark.parametrize(
    "label", ["Source 1: ", "[2] ", "(3)\n", "4. ", "**Document 5:** ", "Doc#6: ", "# 7.\n", '<document index="8">\n']
)
def test_a_number_before_a_document_says_nothing_about_it(label):
    assert found({"messages": [user(f"{label}At 6:40 it leaves.", "why?")]}).documents == ("At 6:40 it leaves.",)


@pytest.mark.parametrize("begin", ["At 6:40", "6:40", "3.5 knots", "<b>Bold</b>", "2024-05-01", "Chapter one: it"])
def test_other_beginnings_belong_to_a_document(begin):
    assert found({"messages": [user(f"{begin} leaves.", "why?")]}).documents == (f"{begin} leaves.",)


def test_no_more_names_than_are_allowed():
    body = {"messages": [user(*(f"number {n}" for n in range(50)), "why?")]}
    assert found(body, most=7).documents == tuple(f"number {n}" for n in range(7))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
WORDS = st.text("abc ", min_size=1, max_size=4)
KINDS = st.sampled_from(["text", "input_text", "tool_result", "document", "search_result", "image"]) | JSON
PARTS = (
    WORDS
    | JSON
    | st.fixed_dictionaries(
        {"type": KINDS},
        optional={
            "text": WORDS | JSON,
            "content": JSON,
            "source": st.fixed_dictionaries({"type": KINDS, "data": JSON}),
        },
    )
)
MESSAGES = JSON | st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | JSON,
        "content": st.lists(PARTS, max_size=3) | JSON,
    },
    optional={
        "type": st.sampled_from(["message", "function_call_output"]) | JSON,
        "output": st.lists(PARTS, max_size=3) | JSON,
    },
)
BODIES = st.dictionaries(
    st.sampled_from(["messages", "input", "system", "documents"]),
    st.lists(MESSAGES, max_size=3) | st.lists(PARTS, max_size=3) | JSON,
)


@given(BODIES)
def test_anything_can_be_read_and_stays_as_it_is(body):
    before = repr(body)
    sources = found(body)
    assert repr(body) == before
    assert len(set(sources.documents)) == len(sources.documents)
    assert all(name == name.strip() and name for name in sources.documents)
    assert sources.question is None or isinstance(sources.question, str)


@given(BODIES, st.lists(MESSAGES, max_size=3), st.lists(PARTS, max_size=3), st.lists(MESSAGES, max_size=3))
def test_the_last_part_of_a_user_message_is_never_a_document(body, before, parts, after):
    asked = user(*parts, "the question itself")
    bodies = [{**deepcopy(body), field: [*before, asked, *after]} for field in ("messages", "input")]
    bodies[1].pop("messages", None)
    for each in bodies:
        assert "the question itself" not in found(each).documents
        each["messages" if "messages" in each else "input"] = [*before, asked]
        assert found(each).question == "the question itself"


@pytest.mark.parametrize("shape", ["messages", "parts", "documents", "results"])
def test_time_is_linear(shape):
    def seconds(size):
        texts = [f"{n} {random.random()}" for n in range(size)]
        body = {
            "messages": {"messages": [user(each, "?") for each in texts]},
            "parts": {"messages": [user(*texts, "?")]},
            "documents": {"documents": [{"text": each} for each in texts]},
            "results": {"messages": [{"role": "tool", "content": each} for each in texts]},
        }[shape]
        start = time.process_time()
        assert len(found(body, most=size).documents) == size
        return time.process_time() - start

    small = min(seconds(2_000) for _ in range(3))
    assert min(seconds(20_000) for _ in range(3)) < 40 * small


def test_blanks_before_a_document_take_no_longer_than_letters():
    def seconds(text):
        start = time.process_time()
        assert found({"documents": [f"{text}The ferry."]}).documents
        return time.process_time() - start

    letters = min(seconds("x" * 2**21) for _ in range(3))
    assert min(seconds(" " * 2**21) for _ in range(3)) < letters + 0.1


def test_a_label_behind_blanks_is_no_part_of_the_document():
    assert found({"documents": ["\n\u3000 Source 1: The ferry."]}).documents == ("The ferry.",)


def test_only_so_many_values_of_the_field_are_looked_at():
    last = "The ferry leaves at noon."
    empty = [[]] * (MAX_LOOKS - 2)  # the list itself and the last text also count
    assert found({"documents": [*empty, last]}).documents == (last,)
    assert found({"documents": [*empty, [], last]}).documents == ()


def test_millions_of_empty_documents_are_not_compared_with_every_question():
    body = {"messages": [user(f"part {number}", f"question {number}") for number in range(MAX_DOCUMENTS)]}
    begin = time.process_time()
    assert len(find_seams(body, [""] * 200_000)) == MAX_DOCUMENTS
    assert time.process_time() - begin < 1


def test_no_question_is_left_out_however_many_there_are():
    longer = "part It also leaves at noon."
    body = {"messages": [user("part", f"{number} questions") for number in range(MAX_DOCUMENTS)]}
    body["messages"].append(user("part", "It also leaves"))
    assert find_seams(body, [longer])[-1] == ("part", "It also leaves")
