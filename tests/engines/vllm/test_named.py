"""Named documents inside vLLM are reused at any position, and exact where exactness is promised."""

import random

import pytest

from tests.engines.vllm.helpers import DOCUMENTS, answer, exact, plain, report, same, start, statuses

pytestmark = pytest.mark.engine

QUESTION = "Who owns the bakery? The owner is"


@pytest.fixture(scope="module")
def llm(tiny_text):
    return start(tiny_text, miss_policy="fill-first", chunk_separator=None)


def written(documents, system="Read this.", label="Source {}: "):
    """A prompt as applications write them: numbered sources, blank lines, a question."""
    sources = [label.format(number) + text for number, text in enumerate(documents, 1)]
    return "\n\n".join([system, *sources, QUESTION])


def test_documents_are_reused_in_any_order_behind_any_text(llm):
    answer(llm, [written(DOCUMENTS)], documents=DOCUMENTS, report=True)
    for _ in range(3):
        documents = random.sample(DOCUMENTS, len(DOCUMENTS))
        system, label = f"System {random.random()}.", random.choice(["Source {}: ", "[{}] ", "<doc {}>"])
        text = written(documents, system, label)
        [output] = answer(llm, [text], documents=random.sample(DOCUMENTS, len(DOCUMENTS)), report=True)
        assert statuses(output) == ["cached"] * len(documents)
        tokenizer = llm.get_tokenizer()
        inside = sum(len(tokenizer.encode(document)) for document in documents)
        assert report(output)["reused_tokens"] >= 0.8 * inside  # short ones, which lose a few tokens at each end


def test_ratio_one_is_plain_vllm(llm):
    text = written(random.sample(DOCUMENTS, 3), f"System {random.random()}.")
    [ours], [theirs] = answer(llm, [text], documents=DOCUMENTS, recompute_ratio=1.0), plain(llm, [text])
    same(ours, theirs, tolerance=1e-4)


def test_names_that_are_nowhere_change_nothing(llm):
    text = written(DOCUMENTS[:2], f"System {random.random()}.")
    [theirs] = plain(llm, [text])
    llm.reset_prefix_cache()
    [ours] = answer(llm, [text], documents=DOCUMENTS[2:])
    assert exact(ours) == exact(theirs)


def test_no_text_makes_a_chunk_that_nobody_named(llm):
    [output] = answer(llm, [written([f" # # {text} # # " for text in DOCUMENTS])], report=True)
    assert report(output)["mode"] == "plain"


@pytest.mark.parametrize("documents", ["text", [1], [["text"]], ["x"] * 1025, {"a": "b"}])
def test_names_that_are_none_are_told(llm, documents):
    [output] = answer(llm, [written(DOCUMENTS)], documents=documents, report=True)
    assert report(output) == {"mode": "plain", "fallback_reason": "bad-parameters"}
