"""Documents that are not named, in a running engine: they are found when they recur in another order, and filled in
the background. At ratio 1 answers are those of plain vLLM."""

import random

import pytest

from tests.engines.vllm.helpers import (
    ask,
    draw,
    measure_nothing,
    plain_answer,
    report,
    same,
    set_miss_policy,
    start,
)

pytestmark = pytest.mark.engine

DOCUMENT, COUNT = 220, 4
ORDERS = [(0, 1, 2, 3), (3, 1, 0, 2), (2, 1, 3, 0), (1, 0, 3, 2)]
"""In the first two orders, no document follows the same document."""


@pytest.fixture(scope="module")
def llm(tiny_llama):
    return start(tiny_llama, skip_tokenizer_init=True, chunk_sources="auto")


def prompts():
    """The same documents in different orders, between texts that do not recur."""
    documents = [draw(DOCUMENT) for _ in range(COUNT)]
    return [
        [*draw(random.randrange(20, 40)), *(token for index in order for token in documents[index]), *draw(12)]
        for order in ORDERS
    ]


def serve(llm, tokens, **params):
    """Answer prompts. Answers are long enough for background fills."""
    [output] = ask(llm, tokens, max_tokens=60, report=True, **params)
    return output


def test_from_the_third_prompt_on_most_of_the_documents_is_reused(llm, monkeypatch):
    measure_nothing(monkeypatch)
    told = [report(serve(llm, tokens, recompute_ratio=0.0)) for tokens in prompts()]
    assert [each["mode"] for each in told] == ["plain", "plain", "reuse", "reuse"]
    assert told[0]["fallback_reason"] is None  # nothing has recurred yet
    for each in told[2:]:
        assert each["reused_tokens"] >= 0.7 * COUNT * DOCUMENT


def test_at_ratio_one_answers_are_those_of_plain_vllm(llm, monkeypatch):
    set_miss_policy(monkeypatch, llm, "fill-first")  # other policies would serve ratio 1 plainly
    modes = []
    for tokens in prompts():
        ours = serve(llm, tokens, recompute_ratio=1.0)
        modes.append(report(ours)["mode"])
        [theirs] = ask(llm, tokens, max_tokens=60, salt=f"{random.random()}", chunk_cache=False)
        same(ours, theirs)
    assert modes == ["plain", "fill", "reuse", "reuse"]


def test_prompts_in_which_nothing_comes_back_are_served_as_by_plain_vllm(llm):
    for _ in range(3):
        tokens = draw(400)
        [ours] = ask(llm, tokens, report=True)
        assert report(ours) == {"mode": "plain", "fallback_reason": None}
        same(ours, plain_answer(llm, tokens), tolerance=0)


def test_a_prompt_that_is_sent_again_is_found_in_vllms_prefix_cache(llm, monkeypatch):
    measure_nothing(monkeypatch)
    for tokens in prompts():
        serve(llm, tokens, recompute_ratio=0.0)
        # The first answer may be another: what was text of it is reused behind the last full block from now on.
        again, once_more = (serve(llm, tokens, recompute_ratio=0.0) for _ in range(2))
        assert again.num_cached_tokens >= len(tokens) - 64
        same(once_more, again)
