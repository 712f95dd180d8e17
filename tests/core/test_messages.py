"""Documents in chat messages, of whatever shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.errors import PromptError
from kvmosaic.core.messages import conversations, documents_in, names_for_each

BOTH = frozenset({"documents", "parts", "tools"})


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": parts("ferry", "bakery", "When does it leave?")},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    {"role": "tool", "tool_call_id": "1", "content": "timetable"},
    {"role": "tool", "tool_call_id": "2", "content": parts("map")},
    {"role": "assistant", "content": "At six."},
    {"role": "user", "content": [*parts("museum"), {"type": "image_url", "image_url": {}}, "Where is it?"]},
]


@pytest.mark.parametrize(
    ("sources", "wanted"),
    [
        (BOTH, ["ferry", "bakery", "When does it leave?", "timetable", "map", "museum"]),
        ({"parts"}, ["ferry", "bakery", "When does it leave?", "museum"]),
        ({"tools"}, ["timetable", "map"]),
        ((), []),
    ],
)
def test_sources(sources, wanted):
    assert documents_in(TALK, sources) == (wanted, "Where is it?")


@pytest.mark.parametrize(
    ("content", "documents", "question"),
    [
        ("a text", [], "a text"),
        (parts("one"), [], "one"),
        (parts("one", "two"), ["one"], "two"),
        ([*parts("one", "two"), {"type": "image_url", "image_url": {}}], ["one"], "two"),
        ([{"type": "input_text", "text": "one"}, {"text": "two"}], ["one"], "two"),
        ([{"type": "text", "text": 7}, {"type": "text"}, 8, None], [], None),
        ([], [], None),
        (None, [], None),
    ],
)
def test_the_last_text_of_the_last_user_message_is_the_question(content, documents, question):
    assert documents_in([{"role": "user", "content": content}], BOTH) == (documents, question)
    answered = [{"role": "user", "content": content}, {"role": "tool", "content": "result"}]
    assert documents_in(answered, BOTH) == ([*documents, "result"], question)


KEYS = st.sampled_from(["role", "content", "type", "text"]) | st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
)


@given(JSON, st.sets(st.sampled_from(sorted(BOTH))))
def test_no_shape_is_refused(messages, sources):
    for sent in (messages, [messages], [{"role": "user", "content": messages}], [{"role": messages, "content": "a"}]):
        documents, question = documents_in(sent, sources)
        assert all(isinstance(text, str) for text in documents)
        assert question is None or isinstance(question, str)


def test_one_conversation_or_several():
    assert conversations(TALK) == [TALK]
    assert conversations([TALK, TALK[:2]]) == [TALK, TALK[:2]]
    assert conversations([]) == [[]]


def test_documents_are_for_all_prompts_or_for_each():
    assert names_for_each(None, 2) == [[], []]
    assert names_for_each(["a", "b"], 2) == [["a", "b"], ["a", "b"]]
    assert names_for_each([["a"], ("b", "c")], 2) == [["a"], ["b", "c"]]


@pytest.mark.parametrize("documents", ["a text", [["a"]], [["a"], "b"], [1, 2], [[1], [2]], {"a": "b"}, {}, 7])
def test_other_documents_are_refused(documents):
    with pytest.raises(PromptError, match="documents must be") as error:
        names_for_each(documents, 2)
    assert "\n" not in str(error.value)
