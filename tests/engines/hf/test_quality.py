"""Quality grows with the ratio. A wrong mask, shifted positions or an unscaled rotation would break this."""

import statistics
from itertools import pairwise

import pytest

from kvmosaic.blend import policy_named
from kvmosaic.engines.hf.chat import chat_prompt, messages_about
from kvmosaic.eval.metrics import kl_per_token
from kvmosaic.eval.synthetic import synthetic
from kvmosaic.hf import LLM

pytestmark = pytest.mark.long  # minutes; the same faults fail the exactness tests in seconds
RATIOS = (0.0, 0.3, 0.6, 0.9, 1.0)


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma-3-270m"])
def llm(request):
    with LLM(request.param, enable_chunk_cache=True, miss_policy="fill-first", dtype="float32") as engine:
        yield engine


@pytest.mark.parametrize("policy", ["composite", "sink-link", "random"])
def test_quality_grows_with_the_ratio(llm, policy):
    """Mean KL of the next token to a full prefill, over a few prompts."""
    kl = {ratio: [] for ratio in RATIOS}
    for example in synthetic(4, 0, 1):
        messages = messages_about(example.system, example.chunks, example.question)
        parsed = llm.parser.parse_named(chat_prompt(llm.tokenizer, messages).token_ids, example.chunks).prompt
        with llm.engine.session():
            full = llm.full_prefill(parsed)
            for ratio in RATIOS:
                ours = llm.assemble(parsed, ratio, 0, policy_named(policy))
                kl[ratio] += kl_per_token(full.logits[None], ours.logits[None])
    means = [statistics.mean(kl[ratio]) for ratio in RATIOS]
    assert means[-1] < 1e-6
    assert means[0] > 1e-3
    assert means[3] < 0.7 * means[0]
    for less, more in pairwise(means):
        assert more < 1.25 * less + 1e-3
