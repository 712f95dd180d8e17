"""Half precision, which most models use: rounding must neither turn the cache off nor change answers."""

import pytest
from vllm import SamplingParams

from tests.engines.vllm.half import half_precision
from tests.engines.vllm.helpers import DOCUMENTS, prompt, start
from tests.half_precision import VLLM_HALF

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llm():
    with half_precision():
        yield start("smollm2-135m", miss_policy="fill-first", dtype=VLLM_HALF)


def first_token(llm, text, **params):
    """Only the first token is compared, because later ones may differ after a near tie that rounding decides."""
    sampling = SamplingParams(
        max_tokens=1, temperature=0, logprobs=3, extra_args={"kv_transfer_params": {"report": True, **params}}
    )
    [output] = llm.generate([text], sampling, use_tqdm=False)
    [logprobs] = output.outputs[0].logprobs
    return output.outputs[0].token_ids[0], {token: seen.logprob for token, seen in logprobs.items()}, output


def test_documents_are_reused_and_recomputing_all_is_plain_vllm(llm):
    first_token(llm, prompt("You are helpful.", DOCUMENTS[:2]))
    text = prompt("Quite another system prompt.", DOCUMENTS[1::-1])
    report = first_token(llm, text)[2].kv_transfer_params
    assert report["mode"] == "reuse"
    assert {chunk["status"] for chunk in report["chunks"]} == {"cached"}
    token, ours, _ = first_token(llm, text, recompute_ratio=1.0)
    expected, theirs, _ = first_token(llm, text, chunk_cache=False)
    assert token == expected
    common = ours.keys() & theirs.keys()
    assert {t: ours[t] for t in common} == pytest.approx({t: theirs[t] for t in common}, abs=0.1)
