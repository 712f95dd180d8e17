"""Blending inside vLLM gives the same tokens and logits as the embedded engine, whatever other requests run."""

import random

import pytest
from transformers import AutoModelForCausalLM

from kvmosaic.blend import policy_named
from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.helpers import (
    DOCUMENTS,
    OURS,
    add_cost,
    answer,
    answer_each,
    block_pool,
    chosen_last,
    forget_costs,
    limit_runs,
    note_loads,
    plain,
    prompt,
    same,
    start,
    worker_side,
)

pytestmark = pytest.mark.engine

ASKING = "composite(asking=1)"
SHARED = [
    "random(seed=3)",
    "sink-link",
    "sink-link(k=2)",
    "kv-deviation",
    "kv-deviation(part=v, layers=2, unit=document)",
    "query-attention",
    "composite",
    ASKING,
]


@pytest.fixture(scope="module")
def llm(tiny_text):
    """Documents are in the store after the first request that has them."""
    return start(tiny_text, miss_policy="fill-first")


@pytest.fixture(scope="module")
def reference(tiny_text, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_text).eval()
    return HFEngine(model, tokenizer, enable_chunk_cache=True, miss_policy="fill-first", **OURS)


@pytest.mark.parametrize("policy", SHARED)
def test_both_engines_choose_the_same_tokens_and_give_the_same_logits(llm, reference, policy):
    documents = [*random.sample(DOCUMENTS, 4), random.choice(DOCUMENTS)]
    text = prompt(f"You are number {random.random()}.", documents, "Who owns the bakery? The owner is")
    parsed = reference.parser.parse(text)
    with reference.engine.session():
        expected = reference.assemble(parsed, 0.4, 0, policy_named(policy))
    [output] = answer(llm, [text], recompute_ratio=0.4, policy=policy)
    assert chosen_last() == expected.recomputed
    assert chosen_last()
    logprobs = expected.logits.log_softmax(-1)
    for token, seen in output.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)


@pytest.mark.parametrize("policy", SHARED)
def test_text_between_chunks_sees_what_is_recomputed_before_it(llm, reference, policy):
    """Such text occurs in conversations. Before a policy that looks at the prompt chooses, that text is computed."""
    text = prompt(f"You are number {random.random()}.", DOCUMENTS, "Who owns the bakery? The owner is")
    whole = reference.parser.parse(text)
    between = random.choice(whole.chunks[1:-1])
    parts = [whole.system, *(span for span in whole.chunks if span != between), whole.question]
    boundaries = [(span.start, span.end) for span in parts]
    parsed = reference.parser.parse(whole.token_ids, boundaries)
    with reference.engine.session():
        expected = reference.assemble(parsed, 0.4, 0, policy_named(policy))
    ids = list(whole.token_ids)
    [output] = answer(llm, [{"prompt_token_ids": ids}], recompute_ratio=0.4, policy=policy, boundaries=boundaries)
    assert chosen_last() == expected.recomputed
    assert chosen_last()
    logprobs = expected.logits.log_softmax(-1)
    for token, seen in output.outputs[0].logprobs[0].items():
        assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)


@pytest.mark.parametrize(("policy", "probed"), [("composite(asking=0)", False), (ASKING, True), ("sink-link", False)])
def test_reports_say_whether_the_policy_probed(llm, reference, policy, probed):
    """Also when the choice is remembered from an earlier request."""
    text = prompt(f"You are number {random.random()}.", DOCUMENTS, "Who owns the bakery? The owner is")
    [embedded] = reference.generate(text, recompute_ratio=0.4, policy=policy, max_tokens=2)
    assert embedded.probed is probed
    for _ in range(2):
        llm.reset_prefix_cache()
        [output] = answer(llm, [text], recompute_ratio=0.4, policy=policy, report=True)
        report = output.kv_transfer_params
        assert (report["policy"], report["probed"]) == (policy, probed)
    [exact] = reference.generate(text, recompute_ratio=1.0, policy=policy, max_tokens=2)
    assert exact.probed is None


@pytest.mark.parametrize("policy", SHARED)
def test_ratio_one_is_a_full_prefill_with_every_policy(llm, policy):
    text = prompt(f"You are number {random.random()}.", DOCUMENTS)
    [ours], [theirs] = answer(llm, [text], recompute_ratio=1.0, policy=policy), plain(llm, [text])
    same(ours, theirs, tolerance=1e-4)


def test_the_same_request_gives_the_same_answer_whatever_was_served_before(llm):
    """The same documents with many questions. Tokens that were recomputed for one question must not reach another."""
    questions = [f"Tell me about the {word}. It is" for word in ("ferry", "bakery", "library", "cheese", "number 7")]
    system = f"Order test {random.random()}."
    texts = [prompt(system, DOCUMENTS * 2, question) for question in questions]
    first = []
    for text in texts:
        llm.reset_prefix_cache()
        first += answer(llm, [text], recompute_ratio=0.3, policy=ASKING)
    for _ in range(3):
        order = random.sample(range(len(texts)), len(texts))
        for index in order:
            [again] = answer(llm, [texts[index]], recompute_ratio=0.3, policy=ASKING)
            same(again, first[index])
    for ours, alone in zip(
        answer(llm, texts, recompute_ratio=0.3, policy=ASKING), first, strict=True
    ):  # all in one batch
        same(ours, alone)
    [theirs] = plain(llm, texts[:1])
    [exact] = answer(llm, texts[:1], recompute_ratio=1.0)
    same(exact, theirs)


@pytest.mark.parametrize("policy", ["kv-deviation(part=v)", "sink-link", ASKING])
def test_a_prompt_is_blended_as_it_was_when_vllm_kept_only_a_part_of_it(llm, policy):
    """The prefix cache returns the part that it still has, and the rest must be blended as before."""
    text = prompt(f"Part test {random.random()}.", DOCUMENTS * 2, "Tell me about the bakery. It is")
    [first] = answer(llm, [text], recompute_ratio=0.3, policy=policy)
    llm.reset_prefix_cache()
    [again] = answer(llm, [text], recompute_ratio=0.3, policy=policy)
    same(again, first)
    # Later blocks are evicted first when other requests need room.
    pool = block_pool(llm)
    kept = 3
    hashes = list(pool.cached_block_hash_to_block._cache)[kept:]
    for block_hash in hashes:
        block = pool.cached_block_hash_to_block.get_one_block(block_hash)
        if block is not None:
            pool._maybe_evict_cached_block(block)
    [partly] = answer(llm, [text], recompute_ratio=0.3, policy=policy)
    same(partly, first)


def test_more_runs_than_a_pass_takes_come_in_several(llm, passes, monkeypatch):
    text = prompt(f"Many runs {random.random()}.", DOCUMENTS * 2, "Tell me about the bakery. It is")
    [first] = answer(llm, [text], recompute_ratio=0.3, policy="random")
    llm.reset_prefix_cache()
    passes.clear()
    limit_runs(monkeypatch, 7)
    [again] = answer(llm, [text], recompute_ratio=0.3, policy="random")
    same(again, first)
    assert max(passes) == 7
    assert len(passes) > 3


def test_requests_that_share_a_new_system_prompt_in_one_step(llm):
    """The second request probes through blocks that the first one computes in the same step."""
    system = f"You are number {random.random()}. " + "Answer with care and in few words, as always. " * 8
    texts = [prompt(system, DOCUMENTS[:2], "One. It is"), prompt(system, DOCUMENTS[1:], "Who owns it? It is")]
    together = answer_each(llm, texts, [{"recompute_ratio": 0.0}, {"recompute_ratio": 0.4, "policy": ASKING}])
    llm.reset_prefix_cache()
    alone = [
        answer(llm, [texts[0]], recompute_ratio=0.0)[0],
        answer(llm, [texts[1]], recompute_ratio=0.4, policy=ASKING)[0],
    ]
    for ours, single in zip(together, alone, strict=True):
        same(ours, single)


def test_a_step_blends_a_bounded_number_of_tokens(llm, monkeypatch):
    """Requests beyond the bound wait for the next steps, and their answers are the same."""
    texts = [prompt(f"Bound {random.random()}.", random.sample(DOCUMENTS, 3)) for _ in range(5)]
    expected = [answer(llm, [text], recompute_ratio=0.5)[0] for text in texts]
    forget_costs(monkeypatch, llm)
    loads = note_loads(monkeypatch)
    with monkeypatch.context() as patch:
        add_cost(patch, llm, 10**6)
        llm.reset_prefix_cache()
        for ours, single in zip(answer(llm, texts, recompute_ratio=0.5), expected, strict=True):
            same(ours, single)
    assert max(loads) == 1
    loads.clear()
    llm.reset_prefix_cache()
    answer(llm, texts, recompute_ratio=0.5)
    assert max(loads) > 1  # several requests are blended in one pass


@pytest.mark.parametrize("fails", [False, True])
def test_the_questions_of_several_requests_are_probed_in_one_pass(llm, monkeypatch, fails):
    """Choices and answers are those of requests that come alone, also if the common pass fails."""
    texts = [
        prompt(f"Together {random.random()}.", random.sample(DOCUMENTS, count), question)
        for count, question in (
            (3, "What about the first one?"),
            (2, "Why?"),
            (4, "What is said about rivers there?"),
        )
    ]
    forget_costs(monkeypatch, llm)
    blender, forward = worker_side().blender, worker_side().forward
    alone = []
    for text in texts:
        [given] = answer(llm, [text], recompute_ratio=0.3, policy=ASKING)
        alone.append((given, chosen_last()))
    probe, passes = forward.probe, []

    def noted(runs, layers, observe):
        passes.append(len(runs))
        if fails and len(runs) > 1:
            raise RuntimeError("the common pass fails")
        return probe(runs, layers, observe)

    monkeypatch.setattr(forward, "probe", noted)
    blender.clear()
    llm.reset_prefix_cache()
    together = answer(llm, texts, recompute_ratio=0.3, policy=ASKING)
    assert passes == ([3, 1, 1, 1] if fails else [3])
    for ours, (theirs, _) in zip(together, alone, strict=True):
        same(ours, theirs)
    assert [tuple(choice.positions.tolist()) for choice in blender._choices.values()] == [each for _, each in alone]


@pytest.mark.parametrize(
    "policy",
    [
        "kv-deviation(layers=1+7)",
        "kv-deviation(layers=999)",
        "nonsense",
        "sink-link(k=-1)",
        f"sink-link(k={10**26})",
        f"random(seed={10**23})",
        f"query-attention(span={10**23})",
        "composite(reach=inf)",
    ],
)
def test_policies_that_cannot_be_served_fall_back_to_plain(llm, policy):
    text = prompt("You are helpful.", DOCUMENTS)
    [ours], [theirs] = answer(llm, [text], recompute_ratio=0.5, policy=policy, report=True), plain(llm, [text])
    assert ours.kv_transfer_params["fallback_reason"] == "bad-parameters"
    same(ours, theirs)
