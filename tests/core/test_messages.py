"""Several prompts in one call, and the documents of each."""

import pytest

from kvmosaic.core.errors import PromptError
from kvmosaic.core.messages import conversations, names_for_each

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]


def test_one_conversation_or_several():
    assert conversations(TALK) == [TALK]
    assert conversations([TALK, TALK[:1]]) == [TALK, TALK[:1]]
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
