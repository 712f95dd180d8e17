"""LoRA adapters in half precision, the only one that vLLM's GPU kernels of adapters have."""

import pytest
from vllm.lora.request import LoRARequest

from tests.engines.vllm.half import half_precision
from tests.engines.vllm.helpers import draw, join, report, start, statuses
from tests.engines.vllm.test_lora import ADAPTERS, LENGTHS, SETTINGS, ask, ask_one, entries_of, plainly, write_adapter
from tests.half_precision import VLLM_HALF

pytestmark = pytest.mark.engine

ROUNDING = 0.15
"""Largest difference of log-probabilities that rounding makes. Adapters change them by more than 1."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(f"adapter {n}", n, write_adapter(folder / str(n), n)) for n in (1, 2)]


@pytest.fixture(scope="module")
def llm(tiny_llama, adapters):
    with half_precision():
        llm = start(tiny_llama, **ADAPTERS, max_loras=3, **SETTINGS | {"dtype": VLLM_HALF})
        for which in adapters:
            ask(llm, [([5, 6, 7], [])], [which])  # the first request has the adapter loaded
        yield llm


def first_tokens(output):
    """Log-probabilities of the likeliest first tokens. Later tokens may differ after a near tie."""
    return {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}


def distance(ours, theirs):
    mine, yours = first_tokens(ours), first_tokens(theirs)
    common = mine.keys() & yours.keys()
    return max(abs(mine[token] - yours[token]) for token in common) if common else float("inf")


def test_each_adapter_has_its_chunks_and_a_batch_answers_each_as_alone(llm, adapters):
    documents = [draw(length) for length in LENGTHS]
    first, second = join([draw(9), *documents, draw(7)]), join([draw(30), *documents[::-1], draw(7)])
    whose, before = (None, *adapters), len(entries_of())
    exact = []
    for which in whose:
        assert statuses(ask_one(llm, first, which, report=True)) == ["filled"] * len(LENGTHS)
        assert llm.reset_prefix_cache()
        reused = ask_one(llm, second, which, recompute_ratio=0.0, report=True)
        assert statuses(reused) == ["cached"] * len(LENGTHS)
        assert report(reused)["reused_tokens"] == sum(LENGTHS)
        assert llm.reset_prefix_cache()
        ours = ask_one(llm, second, which, recompute_ratio=1.0)
        exact.append(plainly(llm, second, which))
        assert distance(ours, exact[-1]) < ROUNDING
    assert len(entries_of()) == before + len(whose) * len(LENGTHS)
    assert llm.reset_prefix_cache()
    together = ask(llm, [second] * len(whose), whose, recompute_ratio=1.0)
    for number, ours in enumerate(together):
        assert distance(ours, exact[number]) < ROUNDING
        assert all(distance(ours, other) > ROUNDING for other in exact if other is not exact[number])
