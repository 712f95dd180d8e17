"""Two real pipeline stages of a model with multi-head latent attention."""

from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.engines.vllm.helpers import LATENT, PART, draw, greedy, join
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.test_pipeline_parallel import (
    ask,
    ask_afresh,
    choice,
    documents,
    entries,
    off_reason,
    on_ranks,
    share,
    talk,
)
from tests.engines.vllm.test_tensor_parallel import STEP, answers

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="never tried on GPUs"),
]

SETTINGS = {
    "miss_policy": "fill-first",
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "prefix_blocks": True,
    **LATENT,
}
"""Settings for latent attention. vLLM has no chunked prefill for it on CPUs, so a step is as long as a prompt."""
needs_latent = pytest.mark.skipif(
    not hasattr(AttentionBackendEnum, "CPU_MLA"), reason="this release of vLLM has no MLA on CPUs"
)
POLICIES: list[dict[str, Any]] = [
    {"recompute_ratio": 0.3, "policy": "sink-link(k=4)"},
    {"recompute_ratio": 0.8, "policy": "kv-deviation(layers=0)"},
    {"recompute_ratio": 0.9, "policy": "kv-deviation(layers=2,part=v)"},
    {"recompute_ratio": 0.6, "policy": "query-attention(layers=1)"},
]
"""Policies that look at layers of either stage. One stage has two of three layers."""


@pytest.fixture(scope="module")
def two(tiny_deepseek):
    with EngineApart(tiny_deepseek, stages=2, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def one(tiny_deepseek):
    with EngineApart(tiny_deepseek, **SETTINGS) as engine:
        yield engine


# --- functions that run in the engines' processes


def together(llm: Any, prompts: list[list[list[int]]], params: list[dict[str, Any]]) -> list[list[int]]:
    """Answers to prompts of parts that are sent together, each with its own parameters."""
    assert llm.reset_prefix_cache()
    joined = [join(parts) for parts in prompts]
    own = [
        each if each.get("chunk_cache") is False else each | {"boundaries": edges}
        for each, (_, edges) in zip(params, joined, strict=True)
    ]
    sampling = [greedy(8, detokenize=False, params=each) for each in own]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in joined], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


# --- the tests


@pytest.mark.long
@needs_latent
def test_each_stage_keeps_its_layers_as_one_stage_would(two, one):
    texts = documents()
    prompt = [[12] * 9, *texts, [7, 8, 9]]
    assert two.call(on_ranks, off_reason) == [None, None]
    heads = {each.partition("L")[0] for each in two.call(on_ranks, share)}
    assert heads == {each.partition("L")[0] for each in one.call(on_ranks, share)}
    assert two.call(ask_afresh, prompt) == one.call(ask_afresh, prompt)
    first, second = two.call(on_ranks, entries)
    [whole] = one.call(on_ranks, entries)
    assert len(whole) >= len(texts)
    assert first.keys() == second.keys() == whole.keys()
    for digest, layers in whole.items():
        theirs = first[digest] + second[digest]
        assert len(first[digest]) < len(theirs) == len(layers) == 3
        for ours, right in zip(theirs, layers, strict=True):
            for part, wanted in zip(ours, right, strict=True):
                torch.testing.assert_close(torch.from_numpy(part), torch.from_numpy(wanted), atol=1e-5, rtol=1e-4)


@pytest.mark.long
@needs_latent
def test_what_one_stage_tests_for_two_ranks(two, one):
    """Chunks are filled, moved, blended, and missing on one stage only."""
    texts, other = documents(), draw(STEP)
    theirs, ours = one.call(answers, texts, other), two.call(answers, texts, other)
    assert ours["all"] == ours["plain"] == theirs["plain"] == ours["in_slices"]
    for case in ("filled", "moved", "asked", "checked", "one_rank_forgot", "reused_again"):
        assert ours[case][0] == theirs[case][0], case
    assert 0 < ours["one_rank_forgot"][1] < ours["moved"][1] == sum(map(len, texts))


@pytest.mark.long
@needs_latent
@pytest.mark.parametrize("params", POLICIES, ids=lambda params: params["policy"])
def test_policies_choose_the_same_tokens(two, one, params):
    texts = documents()
    order = [[13] * 12, *texts[::-1], draw(20)]
    for engine in (two, one):
        engine.call(ask, [[12] * 9, *texts, [7, 8, 9]])
    assert two.call(ask_afresh, order, **params) == one.call(ask_afresh, order, **params)
    [wanted] = one.call(on_ranks, choice)
    assert two.call(on_ranks, choice) == [wanted, wanted]
    assert wanted


@pytest.mark.long
@needs_latent
def test_a_mixed_batch_gives_what_each_request_gives_alone(two):
    texts = documents()
    params = [{"recompute_ratio": 0.0}, POLICIES[3], {"recompute_ratio": 1.0}, {"chunk_cache": False}]
    prompts = [[[20 + n] * (9 + n), *texts[n % 2 :], draw(5 + n)] for n in range(len(params))]
    alone = [two.call(together, [prompt], [own])[0] for prompt, own in zip(prompts, params, strict=True)]
    assert two.call(together, prompts, params) == alone
    plain = [two.call(ask_afresh, prompt, chunk_cache=False)[0] for prompt in prompts[2:]]
    assert alone[2:] == plain


@pytest.mark.long
@needs_latent
def test_exact_prefixes_are_saved_and_loaded_by_both_stages(two):
    opening = draw(PART + 20)
    conversation = [*opening, *two.call(talk, opening, 40)[0], 5, 6, 7]
    two.call(talk, draw(5), 2)  # with its step the last segment is stored
    said, cached = two.call(talk, conversation, 8)
    assert cached == PART
    assert [said] == two.call(ask_afresh, [conversation], chunk_cache=False)
