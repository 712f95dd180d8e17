"""Chunk reuse inside vLLM: real engine, real model."""

import random

import pytest
import torch
from vllm import SamplingParams

from kvmosaic.engines.vllm.telemetry.cost import ENOUGH
from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.helpers import (
    DOCUMENTS,
    OURS,
    answer,
    answer_each,
    learnt_costs,
    plain,
    prompt,
    same,
    start,
    statuses,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llm():
    """Documents are in the store after the first request that has them."""
    return start("smollm2-135m", miss_policy="fill-first")


@pytest.fixture(scope="module")
def reference(smollm2, tokenizer):
    """The embedded engine, which defines the results of reuse."""
    return HFEngine(smollm2, tokenizer, enable_chunk_cache=True, miss_policy="fill-first", **OURS)


def test_ratio_one_is_plain_vllm(llm):
    texts = [prompt("You are helpful.", DOCUMENTS), prompt("Be brief.", DOCUMENTS[::-1])]
    for _ in range(2):
        for ours, theirs in zip(answer(llm, texts, recompute_ratio=1.0), plain(llm, texts), strict=True):
            same(ours, theirs)


def test_documents_are_reused_in_another_order_under_another_system_prompt(llm):
    answer(llm, [prompt("First system prompt.", DOCUMENTS)])
    before = llm.get_stats()
    [second] = answer(llm, [prompt("Quite another one, and longer than the first.", DOCUMENTS[::-1])])
    after = llm.get_stats()
    assert after["cache_hits"] - before["cache_hits"] == len(DOCUMENTS)
    assert after["cache_misses"] == before["cache_misses"]
    assert second.num_cached_tokens > 90


def test_logits_equal_those_of_the_embedded_engine(llm, reference):
    text = prompt("You are helpful.", [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[2]])
    parsed = reference.parser.parse(text)
    with reference.engine.session():
        logits = reference.assemble(parsed, 0.0).logits
    [output] = answer(llm, [text])
    for token, logprob in output.outputs[0].logprobs[0].items():
        assert logprob.logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-3)
    [expected] = reference.generate(text, max_tokens=5, temperature=0)
    assert tuple(output.outputs[0].token_ids[:5]) == expected.token_ids[:5]


def test_plain_requests_never_meet_reused_kv(llm, smollm2, tokenizer):
    """Prefix caching is on. After requests with chunks, a plain one must still get the answer of transformers."""
    text = prompt("A system prompt used only here.", random.sample(DOCUMENTS, 4), "Well then, the answer is")
    for _ in range(2):
        answer(llm, [text])
    inputs = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        logprobs = smollm2(**inputs).logits[0, -1].log_softmax(-1)
    for _ in range(2):
        [output] = plain(llm, [text])
        for token, seen in output.outputs[0].logprobs[0].items():
            assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)


def test_a_batch_gives_what_each_request_gives_alone(llm):
    texts = []
    for number in range(6):
        texts.append(prompt(f"System prompt number {number}.", random.sample(DOCUMENTS, random.randint(1, 4))))
        texts.append(f"Just a plain question number {number}, without documents. The answer is")
    alone = [answer(llm, [text])[0] for text in texts]
    for ours, single in zip(answer(llm, texts), alone, strict=True):
        same(ours, single)


@pytest.mark.parametrize(
    "documents",
    [
        [DOCUMENTS[0], DOCUMENTS[0]],
        ["x"],
        [f"Note {number}." for number in range(16)],
        [" ".join(DOCUMENTS) * 3],
    ],
    ids=["repeated", "tiny", "many", "long"],
)
def test_odd_chunks(llm, documents, reference):
    text = prompt("You are helpful.", documents)
    [exact], [theirs] = answer(llm, [text], recompute_ratio=1.0), plain(llm, [text])
    same(exact, theirs)
    [expected] = reference.generate(text, max_tokens=3, temperature=0)
    assert llm.reset_prefix_cache()  # it has the whole prompt, exactly
    [ours] = answer(llm, [text])
    assert tuple(ours.outputs[0].token_ids[:3]) == expected.token_ids[:3]


def test_a_hundred_tiny_chunks(llm):
    """This is not compared with the embedded engine, which would compute the whole sink prefix for each chunk."""
    text = prompt("You are helpful.", [f"Line {number}." for number in range(100)])
    [exact], [theirs] = answer(llm, [text], recompute_ratio=1.0, report=True), plain(llm, [text])
    same(exact, theirs)
    assert [chunk["status"] for chunk in exact.kv_transfer_params["chunks"]] == ["filled"] * 100
    [again] = answer(llm, [prompt("Be brief.", [f"Line {number}." for number in range(100)])], report=True)
    assert [chunk["status"] for chunk in again.kv_transfer_params["chunks"]] == ["cached"] * 100


def test_a_chunk_is_missing_in_the_middle(llm):
    """The chunks around it are reused, and it is filled. After that, all are reused."""
    answer(llm, [prompt("One.", [DOCUMENTS[0], DOCUMENTS[2]])])
    new = f"A document about the number {random.random()} and nothing else."
    documents = [DOCUMENTS[0], new, DOCUMENTS[2]]
    [first] = answer(llm, [prompt("Two, a longer one.", documents)], report=True)
    assert statuses(first) == ["cached", "filled", "cached"]
    [second] = answer(llm, [prompt("Three!", documents)], report=True)
    assert set(statuses(second)) == {"cached"}
    assert second.num_cached_tokens > first.num_cached_tokens


def test_a_system_prompt_that_another_request_computes_in_the_same_step(llm):
    """vLLM's prefix cache hands out blocks before the forward that fills them, and our forward runs before that."""
    system = f"You are number {random.random()}. " + "Answer with care and in few words, as always. " * 8
    text = prompt(system, DOCUMENTS)
    other = system + " What is the capital of France? It is"
    plain(llm, ["With the first step of all, workers tell the scheduler what they have. It is"])
    [_, together] = answer_each(llm, [other, text], [{"chunk_cache": False}, {"recompute_ratio": 1.0}])
    [alone] = plain(llm, [text])
    same(together, alone)
    [first] = answer(llm, [prompt(system, DOCUMENTS[:2])])
    [second] = answer(llm, [prompt(system, DOCUMENTS[:2])], recompute_ratio=0.0)
    same(second, first)


def test_cache_salts_are_kept_apart(llm):
    text = prompt("You are helpful.", DOCUMENTS)
    answer(llm, [text])
    salted = {"prompt": text, "cache_salt": f"{random.random()}"}
    seen = []
    for _ in range(2):
        llm.reset_prefix_cache()
        [output] = answer(llm, [salted], report=True)
        seen.append(set(statuses(output)))
    assert seen == [{"filled"}, {"cached"}]


def test_resetting_the_cache_forgets_chunks(llm):
    text = prompt("You are helpful.", DOCUMENTS)
    answer(llm, [text])
    assert llm.reset_prefix_cache(reset_connector=True)
    before = llm.get_stats()
    [output] = answer(llm, [text], report=True)
    after = llm.get_stats()
    assert set(statuses(output)) == {"filled"}
    assert after["cache_misses"] - before["cache_misses"] == len(DOCUMENTS)


def test_prompt_logprobs_need_every_token(llm):
    text = prompt("You are helpful.", DOCUMENTS)
    answer(llm, [text])
    sampling = SamplingParams(
        max_tokens=5, temperature=0, prompt_logprobs=1, extra_args={"kv_transfer_params": {"report": True}}
    )
    [output] = llm.generate([text], sampling, use_tqdm=False)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.kv_transfer_params["fallback_reason"] == "every-token-wanted"


def test_bad_request_parameters_fall_back_to_plain(llm, caplog):
    text = prompt("You are helpful.", DOCUMENTS)
    [ours] = answer(llm, [text], recompute_ratio=7)
    [theirs] = plain(llm, [text])
    same(ours, theirs)


def test_predicted_times_come_from_measured_ones(llm):
    """Moving KV is cheaper than computing it, in a model of some size."""
    for _ in range(1 + ENOUGH):  # the first may fill them
        answer(llm, [prompt(f"Warm {random.random()}.", DOCUMENTS[:3])])
    lines = learnt_costs(llm)
    assert 0 < lines["blend"].seconds(100) < 60
    assert 0 < lines["remap"].seconds(100) < lines["blend"].seconds(100)
