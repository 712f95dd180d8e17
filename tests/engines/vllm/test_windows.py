"""Layers with a sliding window: only what later tokens can see of them is stored, and nothing else changes."""

import json
import random
import subprocess
import sys
from collections import defaultdict

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import get_group_id

from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_prefix_blocks import ask, exact
from tests.engines.vllm.tiny import write_tiny_gemma
from tests.engines.vllm.window_run import block_pool, spoil_free_blocks

WINDOW, TAIL, PART = 60, 64, 256
CHUNK = [(0, 20), (20, PART + 20), (PART + 20, PART + 50)]
"""System, one chunk, question."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_gemma(tmp_path_factory.mktemp("model") / "gemma", WINDOW)


def run(**arguments):
    command = [sys.executable, "-m", "tests.engines.vllm.window_run", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_less_is_stored_and_nothing_else_changes(model):
    arguments = {
        "model": model,
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
    """Answers are the same to the last bit, and so are hits. Prompts that branch off inside a part find less of it in
    vLLM's own cache when it came from the store, where it is not all there: computed in other pieces, numbers may be
    rounded differently."""
    branches = whole["branches"]
    for index, (mine, yours) in enumerate(zip(tails["answers"], whole["answers"], strict=True)):
        if index in branches:
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
        if token != other:  # as likely as each other, and from here on another text
            assert a[str(token)] == pytest.approx(a[str(other)], abs=1e-3)
            break


@pytest.fixture(scope="module")
def llm(model):
    """Nothing it does is measured: on a busy machine, moving KV may take longer than computing it with so small a
    model, and requests would rightly be served plainly."""
    from kvmosaic.vllm import LLM

    settings = {"prefix_blocks": True, "skip_tokenizer_init": True, "miss_policy": "background"}
    llm = LLM(model, enable_chunk_cache=True, **SMALL | settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_kv_transfer_group().loader.timer, "_observe", lambda stage, tokens, seconds: None)
        yield llm


def draw(count):
    return [random.randrange(10, 500) for _ in range(count)]


def forget(llm):
    """Have stored and filled what is due, then empty vLLM's own prefix cache."""
    ask(llm, draw(3))
    assert llm.reset_prefix_cache()


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
    # Now vLLM loses all but the first blocks, and the store everything.
    cached = defaultdict(list)
    for block_id in order:  # blocks are handed out in this order
        if block_hash := pool.blocks[block_id].block_hash:
            cached[get_group_id(block_hash)].append(block_id)
    pool.evict_blocks({block_id for blocks in cached.values() for block_id in blocks[3:]})
    worker = get_kv_transfer_group().loader
    worker.cache.store.clear(lambda key: True)
    if is_known:
        ask(llm, draw(3))  # with this step the scheduler hears of it
    [partly] = ask(llm, tokens, **params)
    assert partly.num_cached_tokens
    forget(llm)
    [wanted] = ask(llm, tokens, salt="computed anew", chunk_cache=False)
    close(partly, wanted)


def close(ours, theirs):
    """Computed in other pieces, numbers may be rounded differently."""
    (mine, mine_steps), (yours, yours_steps) = exact(ours), exact(theirs)
    assert mine == yours
    for token, a, b in zip(mine, mine_steps, yours_steps, strict=True):
        assert a[token] == pytest.approx(b[token], abs=1e-3)


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


def test_a_preempted_request_leaves_no_half_part_to_others(llm):
    """It began behind blocks that vLLM had, whole, and comes back when they are gone: then it is brought all of it,
    less the windows."""
    tokens, shared = draw(PART + 50), PART // 2
    forget(llm)
    ask(llm, tokens)
    forget(llm)
    ask(llm, tokens[:shared] + draw(20))
    engine = llm.llm_engine
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    engine.add_request("preempted", {"prompt_token_ids": tokens}, sampling)
    for _ in range(3):
        engine.step()
    assert engine.engine_core.engine_core.scheduler.reset_prefix_cache(reset_running_requests=True)
    spoil_free_blocks(llm)
    while engine.has_unfinished_requests():
        engine.step()
    other = tokens[:shared] + draw(20)
    [ours] = ask(llm, other)
    forget(llm)
    [wanted] = ask(llm, other, salt="computed anew", chunk_cache=False)
    close(ours, wanted)
