"""Long blends run in slices, so that no request waits for a whole blend, and answers stay the same."""

import random

import pytest

from kvmosaic.engines.vllm.scheduler_side import admission
from tests.engines.vllm.helpers import (
    SMALL,
    block_pool,
    choose_at_any_length,
    draw,
    greedy,
    is_idle,
    join,
    lend_nothing,
    same,
    start,
)

pytestmark = pytest.mark.engine

STEP, REQUESTS = 64, 8
"""Maximum number of tokens and of requests in a step of vLLM."""
CHUNK, CHUNKS = 70, 6


@pytest.fixture(scope="module")
def llm(tiny_llama):
    room = {"max_num_batched_tokens": STEP, "max_num_seqs": REQUESTS}
    return start(tiny_llama, miss_policy="fill-first", skip_tokenizer_init=True, **room)


@pytest.fixture(scope="module")
def documents(llm):
    """Documents, all of which are stored."""
    documents = [draw(CHUNK) for _ in range(CHUNKS)]
    ids, boundaries = request(documents)
    add(llm, "first", ids, boundaries=boundaries)
    finish(llm, "first")
    return documents


def request(documents, system=20):
    """A prompt of the documents in a given order, and its parts."""
    return join([draw(system), *random.sample(documents, CHUNKS), draw(9)])


def add(llm, name, ids, count=4, **params):
    sampling = greedy(count, logprobs=1, detokenize=False, params={"report": True, **params})
    llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling)


def finish(llm, name):
    """Step until a request is done. Returns its output and the number of steps."""
    for steps in range(1, 1000):
        for output in llm.llm_engine.step():
            if output.finished and output.request_id == name:
                return output, steps
    raise AssertionError("it never ends")


def until_idle(llm):
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


@pytest.mark.parametrize(
    ("policy", "ratio"), [("composite", 0.5), ("sink-link", 0.5), ("sink-link", 0.9), ("composite", 1.0)]
)
def test_answers_are_those_of_one_step(llm, documents, policy, ratio, monkeypatch):
    for number in range(3):
        ids, boundaries = request(documents)
        params = {"boundaries": boundaries, "policy": policy, "recompute_ratio": ratio}
        with monkeypatch.context() as patch:
            patch.setattr(admission, "LONE_SHARE", 100.0)
            add(llm, "alone", ids, **params)
            alone, few = finish(llm, "alone")
        llm.reset_prefix_cache()
        add(llm, "in steps", ids, **params)
        in_steps, some = finish(llm, "in steps")
        same(in_steps, alone)
        llm.reset_prefix_cache()
        for other in range(2):
            add(llm, f"other-{other}", draw(40), 200, chunk_cache=False)
            llm.llm_engine.step()
        add(llm, "among others", ids, **params)
        among, many = finish(llm, "among others")
        same(among, alone)
        assert among.num_cached_tokens == alone.num_cached_tokens
        assert among.kv_transfer_params == alone.kv_transfer_params
        recomputed = ratio * CHUNK * CHUNKS
        for steps in (some, many):
            more = steps - few
            assert more >= recomputed / STEP - 1, f"{recomputed} tokens in {more} more steps, prompt {number}"
        llm.llm_engine.abort_request([f"other-{other}" for other in range(2)])
        until_idle(llm)
        llm.reset_prefix_cache()


def test_a_pass_takes_more_runs_than_the_engine_takes_requests(llm, documents, passes):
    ids, boundaries = request(documents)
    add(llm, "runs", ids, boundaries=boundaries, recompute_ratio=0.1, policy="random")
    finish(llm, "runs")
    assert max(passes) > REQUESTS
    assert llm.llm_engine.vllm_config.scheduler_config.max_num_seqs == REQUESTS


@pytest.mark.parametrize("policy", ["random", "sink-link", "composite(asking=1)", "query-attention", "kv-deviation"])
@pytest.mark.parametrize("lends", [True, False])
def test_a_question_that_begins_a_block(llm, documents, policy, lends, monkeypatch):
    """Its first block does not exist yet when everything before it is loaded, and vLLM may have no block to lend."""
    if not lends:
        lend_nothing(monkeypatch, llm)
    choose_at_any_length(monkeypatch, llm)
    block = SMALL["block_size"]
    ids, boundaries = request(documents, system=-CHUNK * CHUNKS % block + block)
    assert boundaries[-1][0] % block == 0
    add(llm, "other", draw(40), 100, chunk_cache=False)
    llm.llm_engine.step()
    params = {"boundaries": boundaries, "policy": policy, "recompute_ratio": 0.6}
    add(llm, "among others", ids, **params)
    among, _ = finish(llm, "among others")
    until_idle(llm)
    assert among.kv_transfer_params["mode"] == "reuse"
    llm.reset_prefix_cache()
    add(llm, "alone", ids, **params)
    same(among, finish(llm, "alone")[0])
    until_idle(llm)


def test_beside_others_a_choice_that_would_take_long_is_made_without_a_probe(llm, documents):
    """Otherwise all text before the question would be computed in one step."""
    ids, boundaries = request(documents, system=STEP)
    add(llm, "other", draw(40), 100, chunk_cache=False)
    llm.llm_engine.step()
    params = {"boundaries": boundaries, "recompute_ratio": 0.6}
    add(llm, "among others", ids, policy="composite(asking=1)", **params)
    among, _ = finish(llm, "among others")
    until_idle(llm)
    report = among.kv_transfer_params
    assert (report["mode"], report["probed"]) == ("reuse", False)
    llm.reset_prefix_cache()
    add(llm, "starts", ids, policy="sink-link", **params)
    starts, _ = finish(llm, "starts")
    same(among, starts)
    assert report["recomputed"] == starts.kv_transfer_params["recomputed"]
    llm.reset_prefix_cache()
    add(llm, "alone", ids, policy="composite(asking=1)", **params)  # the other choice was not remembered
    assert finish(llm, "alone")[0].kv_transfer_params["probed"] is True


def test_others_get_a_token_with_every_slice(llm, documents):
    add(llm, "other", draw(40), 100, chunk_cache=False)
    llm.llm_engine.step()
    ids, boundaries = request(documents)
    add(llm, "blend", ids, boundaries=boundaries, recompute_ratio=1.0)
    counts = []
    while True:
        outputs = {output.request_id: output for output in llm.llm_engine.step()}
        if "blend" in outputs:
            break
        counts.append(len(outputs["other"].outputs[0].token_ids))
    assert counts == list(range(counts[0], counts[0] + len(counts)))
    assert len(counts) >= CHUNK * CHUNKS / STEP
    until_idle(llm)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_what_is_aborted_between_slices_leaves_nothing_behind(llm, documents, steps):
    pool = block_pool(llm)
    until_idle(llm)
    free = pool.get_num_free_blocks()
    add(llm, "other", draw(40), 60, chunk_cache=False)
    llm.llm_engine.step()
    ids, boundaries = request(documents)
    add(llm, "gone", ids, boundaries=boundaries, recompute_ratio=1.0)
    for _ in range(steps):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["gone"])
    ids, boundaries = request(documents)
    params = {"boundaries": boundaries, "recompute_ratio": 1.0}
    add(llm, "next", ids, **params)
    among, _ = finish(llm, "next")
    until_idle(llm)
    assert pool.get_num_free_blocks() == free
    add(llm, "plain", ids, chunk_cache=False)
    same(among, finish(llm, "plain")[0])
    assert is_idle(llm)
