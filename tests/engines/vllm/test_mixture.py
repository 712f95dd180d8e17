"""A mixture of experts: the experts of a token depend on what it attended to, so reuse may change them."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmosaic.blend import policy_named
from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.helpers import (
    OURS,
    ask,
    chosen_last,
    draw,
    greedy,
    join,
    plain_answer,
    report,
    same,
    start,
    statuses,
    worker_side,
)
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.test_tensor_parallel import STEP, answers

GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.engine, pytest.mark.skipif(GPU, reason="vLLM's kernels for experts on GPUs round float32")]

SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_model_len": 1024}
LENGTHS = (21, 33, 48, 64, 70)


@pytest.fixture(scope="module")
def llm(tiny_mixture):
    return start(tiny_mixture, **SETTINGS)


@pytest.fixture(scope="module")
def reference(tiny_mixture):
    """The embedded engine, which defines the results of reuse."""
    model = AutoModelForCausalLM.from_pretrained(tiny_mixture, dtype=torch.float32).eval()
    return HFEngine(
        model, None, enable_chunk_cache=True, miss_policy="fill-first", **OURS | {"chunk_separator": None}
    )


def random_prompt():
    """A system prompt, documents and a question, as tokens; and its boundaries."""
    return join([draw(9), *map(draw, random.sample(LENGTHS, 4)), draw(7)])


def test_tokens_use_different_experts(llm, monkeypatch):
    """Otherwise the tests below would be those of an ordinary model."""
    gate = worker_side().forward._runner.model.get_submodule("model.layers.1.mlp.gate")
    logits, forward = [], gate.forward

    def noting(hidden):
        output = forward(hidden)
        logits.append(output[0])
        return output

    monkeypatch.setattr(gate, "forward", noting)
    ask(llm, draw(200), max_tokens=1)
    chosen = torch.cat(logits).topk(2).indices
    assert len(chosen.unique()) == 8
    assert len(chosen.sort().values.unique(dim=0)) > 8


def test_ratio_one_is_plain_vllm(llm):
    for policy in ("composite", "random", "query-attention"):
        ids, boundaries = random_prompt()
        for _ in range(2):  # filled, then reused
            [ours] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0, policy=policy)
            same(ours, plain_answer(llm, ids))


@pytest.mark.parametrize("policy", ["none", "random(seed=3)", "kv-deviation(layers=1)", "query-attention(layers=1)"])
def test_both_engines_choose_the_same_tokens_and_give_the_same_logits(llm, reference, policy):
    ids, boundaries = random_prompt()
    ratio = 0.0 if policy == "none" else 0.4
    with reference.engine.session():
        expected = reference.assemble(reference.parser.parse(ids, boundaries), ratio, 0, policy_named(policy))
    [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=ratio, policy=policy, report=True)
    assert report(output)["mode"] == "fill"
    if ratio:
        assert chosen_last() == expected.recomputed
    logprobs = expected.logits.log_softmax(-1)
    for token, seen in output.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)


def test_documents_are_reused_in_another_order_under_another_system_prompt(llm, reference):
    documents = [draw(length) for length in LENGTHS]
    ids, boundaries = join([draw(9), *documents, draw(7)])
    ask(llm, ids, boundaries=boundaries)
    ids, boundaries = join([draw(30), *documents[::-1], draw(7)])
    [output] = ask(llm, ids, boundaries=boundaries, report=True)
    assert statuses(output) == ["cached"] * len(LENGTHS)
    assert report(output)["reused_tokens"] == sum(LENGTHS)
    with reference.engine.session():
        expected = reference.assemble(reference.parser.parse(ids, boundaries), 0.0).logits.log_softmax(-1)
    for token, seen in output.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(expected[token]), abs=1e-3)


def test_a_mixed_batch_gives_what_each_request_gives_alone(llm):
    prompts = [random_prompt() for _ in range(4)]
    params: list[dict[str, Any]] = [
        {"recompute_ratio": ratio, "boundaries": boundaries}
        for ratio, (_, boundaries) in zip((0.0, 0.4, 1.0), prompts[1:], strict=True)
    ]
    params = [{"chunk_cache": False}, *params]
    given = [{"prompt_token_ids": ids} for ids, _ in prompts]
    sampling = [greedy(8, logprobs=3, detokenize=False, params=each) for each in params]
    alone = [llm.generate(each, own, use_tqdm=False)[0] for each, own in zip(given, sampling, strict=True)]
    assert llm.reset_prefix_cache()
    together = llm.generate(given, sampling, use_tqdm=False)
    for ours, theirs in zip(together, alone, strict=True):
        same(ours, theirs)


def said(llm, documents):
    """The answer of vLLM alone to the prompt that ``answers`` calls ``all``."""
    ids, _ = join([[11] * 9, *documents, [7, 8, 9]])
    [output] = llm.generate({"prompt_token_ids": ids}, greedy(12, detokenize=False), use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.long
def test_two_ranks_answer_as_one(tiny_mixture):
    documents, other = [draw(length) for length in LENGTHS], draw(STEP)
    settings = SETTINGS | {"max_num_batched_tokens": STEP}
    with EngineApart(tiny_mixture, ranks=2, **settings) as engine:
        two = engine.call(answers, documents, other)
    with EngineApart(tiny_mixture, ranks=2, with_cache=False, skip_tokenizer_init=True) as engine:
        alone = engine.call(said, documents)
    one = answers(start(tiny_mixture, **settings), documents, other)
    assert two["heads"] == ["0-0of2", "1-1of2"]
    assert two["all"] == two["plain"] == two["in_slices"] == alone == one["plain"]
    for case in ("filled", "moved", "asked", "checked", "one_rank_forgot", "reused_again"):
        assert two[case][0] == one[case][0], case
    assert [two[case][1] for case in ("filled", "moved", "reused_again")] == [0, sum(LENGTHS), sum(LENGTHS)]
