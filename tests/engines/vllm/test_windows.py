"""Layers with a sliding window: only the KV that later tokens can see is stored, and nothing else changes."""

import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_group_id

from tests.engines.vllm.helpers import (
    PART,
    ask,
    block_pool,
    close,
    core_scheduler,
    draw,
    exact,
    forget,
    learn_nothing,
    measure_nothing,
    paged_caches,
    start,
    store,
)

pytestmark = pytest.mark.engine

TAIL = 64
CHUNK = [(0, 20), (20, PART + 20), (PART + 20, PART + 50)]
"""Lengths of system, one chunk, question."""


def spoil_free_blocks(llm):
    """Overwrite free blocks, which may hold anything that their last owner left."""
    pool = block_pool(llm)
    free = [block.block_id for block in pool.blocks[1:] if not block.ref_cnt and not block.block_hash]
    for cache in paged_caches():
        cache.index_fill_(cache.shape.index(len(pool.blocks)), torch.tensor(free, device=cache.device), 30.0)


def run(model: str | Path, seed: int, part: int, vocabulary: int, rounds: int, **settings):
    """Answers, cached tokens and stored bytes, of documents and of ``rounds`` conversations. Parts of exact prefixes
    have ``part`` tokens."""
    chance = random.Random(seed)

    def drawn(count):
        return [chance.randrange(10, vocabulary) for _ in range(count)]

    llm = start(model, prefix_blocks=True, miss_policy="fill-first", max_model_len=4 * part, **settings)
    llm.llm_engine.collective_rpc(learn_nothing)
    outputs, branches = [], []

    def said(tokens, **params):
        spoil_free_blocks(llm)
        [output] = ask(llm, tokens, **params)
        outputs.append(output)
        return output

    def held():
        store().flush()
        return sum(nbytes for _, nbytes in store().held().values())

    # Documents, then the same ones in other prompts: at other positions, with other neighbours, with some new ones.
    system, documents = drawn(20), [drawn(chance.randint(part // 2, part)) for _ in range(4)]
    for picked in ((0, 1), (1, 0), (2, 1), (3, 2), (1, 3)):
        tokens, boundaries = list(system), [(0, len(system))]
        for index in picked:
            boundaries.append((len(tokens), len(tokens) + len(documents[index])))
            tokens += documents[index]
        for ratio in (0.0, 0.1):
            spans = [*boundaries, (len(tokens), len(tokens) + 10)]
            params = {"boundaries": spans, "recompute_ratio": ratio, "policy": "sink-link"}
            said(tokens + drawn(10), **params)
    chunk_bytes = held()
    # Conversations that grow, come back after vLLM forgot them, and branch while vLLM has them from the store.
    for _ in range(rounds):
        turn = drawn(part + chance.randint(1, part))
        for _ in range(2):
            answer = said(turn)
            forget(llm)
            said(turn)
            for _ in range(2):
                branches.append(len(outputs))
                said(turn[: chance.randrange(part // 4, len(turn))] + drawn(20))
            turn = turn + list(answer.outputs[0].token_ids) + drawn(part // 4)
        forget(llm)
    return {
        "answers": [exact(output) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "branches": branches,
        "chunk_bytes": chunk_bytes,
        "prefix_bytes": held() - chunk_bytes,
    }


def test_less_is_stored_and_nothing_else_changes(tiny_gemma):
    arguments = {
        "model": tiny_gemma,
        "seed": random.randrange(10**6),
        "part": PART,
        "vocabulary": 500,
        "rounds": 3,
        "skip_tokenizer_init": True,
    }
    tails, whole = (run(**arguments, window_tails=each) for each in (True, False))
    compare(tails, whole)
    # Four of six layers keep a quarter of each part.
    assert tails["prefix_bytes"] / whole["prefix_bytes"] == pytest.approx((2 + 4 * TAIL / PART) / 6, rel=0.02)
    assert tails["chunk_bytes"] < 0.7 * whole["chunk_bytes"]


@pytest.mark.long
def test_gemma():
    arguments = {
        "model": "gemma-3-270m",
        "seed": random.randrange(10**6),
        "part": 1024,
        "vocabulary": 200000,
        "rounds": 1,
    }
    tails, whole = (run(**arguments, window_tails=each) for each in (True, False))
    compare(tails, whole)
    for kind in ("chunk_bytes", "prefix_bytes"):
        print(f"{kind}: {tails[kind]} of {whole[kind]}, {tails[kind] / whole[kind]:.0%}")
        assert tails[kind] < 0.8 * whole[kind]


def compare(tails, whole):
    """Check that answers and hits are the same, to the last bit. If a segment came from the store, prompts that
    branch off inside it find less of it in vLLM's own cache. Their numbers are computed in other pieces, and may be
    rounded differently. On a GPU all numbers may be, because the blocks decide how its kernels split their work."""
    branches = whole["branches"]
    for index, (mine, yours) in enumerate(zip(tails["answers"], whole["answers"], strict=True)):
        if index in branches or torch.cuda.is_available():
            same_up_to_rounding(mine, yours)
        else:
            assert mine == yours
    hits = [[count for index, count in enumerate(each["cached"]) if index not in branches] for each in (tails, whole)]
    assert hits[0] == hits[1]
    assert sum(count > 0 for count in hits[0]) > len(hits[0]) / 2
    assert all(tails["cached"][index] <= whole["cached"][index] for index in branches)


def same_up_to_rounding(mine, yours):
    for token, other, a, b in zip(mine[0], yours[0], mine[1], yours[1], strict=True):
        assert all(a[each] == pytest.approx(b[each], abs=1e-3) for each in a.keys() & b.keys())
        if token != other:  # equally likely tokens, after which the texts differ
            assert a[token] == pytest.approx(a[other], abs=1e-3)
            break


@pytest.fixture(scope="module")
def llm(tiny_gemma):
    """An engine that learns no costs."""
    llm = start(tiny_gemma, prefix_blocks=True, skip_tokenizer_init=True)
    with pytest.MonkeyPatch.context() as patch:
        measure_nothing(patch)
        yield llm


@pytest.mark.parametrize("params", [{"boundaries": CHUNK}, {}], ids=["chunk", "prefix"])
@pytest.mark.parametrize("is_known", [False, True], ids=["unexpected", "known"])
def test_what_vllm_has_of_the_beginning_is_not_continued_with(llm, params, is_known):
    tokens = draw(PART + 50)
    forget(llm)
    ask(llm, tokens, **params)
    forget(llm)
    spoil_free_blocks(llm)
    pool = block_pool(llm)
    order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    [reused] = ask(llm, tokens, **params)
    assert reused.num_cached_tokens >= PART
    # Now vLLM loses all blocks but the first, and the store loses everything.
    cached = defaultdict(list)
    for block_id in order:  # blocks are handed out in this order
        if block_hash := pool.blocks[block_id].block_hash:
            cached[get_group_id(block_hash)].append(block_id)
    pool.evict_blocks({block_id for blocks in cached.values() for block_id in blocks[3:]})
    store().clear(lambda key: True)
    if is_known:
        ask(llm, draw(3))  # with this step the scheduler learns of it
    [partly] = ask(llm, tokens, **params)
    assert partly.num_cached_tokens
    forget(llm)
    [wanted] = ask(llm, tokens, salt="computed anew", chunk_cache=False)
    close(partly, wanted)


def test_a_policy_that_looks_inside_is_not_given_half_a_chunk(llm):
    tokens = draw(PART + 50)
    [wanted] = ask(llm, tokens, salt="computed anew", chunk_cache=False)
    forget(llm)
    for _ in range(2):
        [output] = ask(llm, tokens, boundaries=CHUNK, recompute_ratio=0.2, policy="random", report=True)
        assert output.kv_transfer_params["fallback_reason"] == "window"
        close(output, wanted)
    short = [(0, 20), (20, 20 + TAIL), (20 + TAIL, len(tokens))]  # all of it is kept
    [output] = ask(llm, tokens, boundaries=short, recompute_ratio=0.2, policy="random", report=True)
    assert output.kv_transfer_params.get("fallback_reason") != "window"


@pytest.mark.skipif(torch.cuda.is_available(), reason="with steps in flight vLLM does not reset its cache")
def test_a_preempted_request_leaves_no_half_part_to_others(llm):
    """It began behind complete blocks in vLLM's cache, and resumes when they are evicted. Then everything is loaded,
    without the beginnings of windows."""
    tokens, shared = draw(PART + 50), PART // 2
    forget(llm)
    ask(llm, tokens)
    forget(llm)
    ask(llm, tokens[:shared] + draw(20))
    engine = llm.llm_engine
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine.add_request("preempted", {"prompt_token_ids": tokens}, sampling)
    scheduler = core_scheduler(llm)
    while not any(request.num_output_tokens for request in scheduler.running):
        engine.step()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    spoil_free_blocks(llm)
    while engine.has_unfinished_requests():
        engine.step()
    other = tokens[:shared] + draw(20)
    [ours] = ask(llm, other)
    forget(llm)
    [wanted] = ask(llm, other, salt="computed anew", chunk_cache=False)
    close(ours, wanted)
