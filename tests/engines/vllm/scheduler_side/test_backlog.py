"""What the backlog hands out with a step: real pool of blocks, real scheduler output."""

import time

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from kvmosaic.engines.vllm.compat.scheduling import FreeBlocks, Step
from kvmosaic.engines.vllm.scheduler_side import backlog as backlog_module
from kvmosaic.engines.vllm.scheduler_side.backlog import OVERDUE_SECONDS, FillBacklog
from tests.engines.vllm.scheduler_side.fakes import BLOCK

SINK = tuple(range(40))
SHARED, REST = 32, 8
"""The sink's tokens that fill blocks, and those behind them."""


def make_pool(blocks=1000):
    return FreeBlocks(BlockPool(blocks + 1, enable_caching=False, hash_block_size=BLOCK))  # one is never handed out


def step_of(**tokens):
    """What the scheduler planned: some tokens of each request."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = tokens, sum(tokens.values())
    return Step.of(output)


def decoding_step():
    return step_of(request=1)


def backlog_of(chunks, step_tokens):
    """``chunks`` are pairs of length and context."""
    backlog = FillBacklog(BLOCK, step_tokens)
    for number, (length, context) in enumerate(chunks):
        backlog.add(bytes([number]), (number,) * length, context)
    return backlog


def taken(fills):
    return [[(digest[0], len(tokens)) for digest, tokens in fill.chunks] for fill in fills]


def test_chunks_of_one_context_are_filled_together_in_blocks_for_all_of_them():
    fills = backlog_of([(20, SINK), (8, SINK), (9, SINK)], 500).take(decoding_step(), make_pool())
    assert taken(fills) == [[(0, 20), (1, 8), (2, 9)]]
    [fill] = fills
    assert fill.context == SINK
    assert len(fill.blocks[0]) == SHARED // BLOCK + 2 + 1 + 2


def test_the_context_is_charged_once_as_far_as_it_is_computed_once():
    cost = SHARED + 3 * (REST + 10)
    for budget, count in ((cost, 3), (cost - 1, 2)):
        backlog = backlog_of([(10, SINK)] * 3, budget)
        assert [len(fill.chunks) for fill in backlog.take(decoding_step(), make_pool())] == [count]
        assert sum(len(fill.chunks) for fill in backlog.take(decoding_step(), make_pool())) == 3 - count


def test_chunks_of_several_contexts_are_several_groups_oldest_first():
    other = tuple(range(100, 150))
    fills = backlog_of([(5, SINK), (6, other), (7, SINK), (8, ())], 500).take(decoding_step(), make_pool())
    assert taken(fills) == [[(0, 5), (2, 7)], [(1, 6)], [(3, 8)]]
    assert [fill.context for fill in fills] == [SINK, other, ()]
    blocks = [block for fill in fills for block in fill.blocks[0]]
    assert len(blocks) == len(set(blocks))


def test_a_step_that_computes_prompts_or_nothing_fills_nothing():
    backlog = backlog_of([(20, SINK)], 500)
    for step in (step_of(prompt=2), step_of(), step_of(prompt=30, one=1)):
        assert backlog.take(step, make_pool()) == []
    assert len(backlog) == 1
    assert len(backlog.take(step_of(one=1, two=1), make_pool())) == 1
    assert len(backlog) == 0


def test_what_waited_for_long_is_filled_with_any_step_that_computes(monkeypatch):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog = backlog_of([(20, SINK)], 500)
    now += OVERDUE_SECONDS
    assert backlog.take(step_of(prompt=30), make_pool()) == []
    now += 0.1
    assert backlog.take(step_of(), make_pool()) == []
    assert len(backlog.take(step_of(prompt=30), make_pool())) == 1


def test_a_chunk_that_several_requests_lack_is_filled_once_at_its_first_place():
    backlog = backlog_of([(20, SINK), (30, SINK)], 500)
    backlog.add(bytes([0]), (0,) * 20, SINK)
    assert taken(backlog.take(decoding_step(), make_pool())) == [[(0, 20), (1, 30)]]


def test_too_many_chunks_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(backlog_module, "MAX_WAITING", 2)
    backlog = backlog_of([(20, SINK), (30, SINK), (40, SINK)], 500)
    assert taken(backlog.take(decoding_step(), make_pool())) == [[(1, 30), (2, 40)]]


def test_a_cleared_backlog_fills_nothing():
    backlog = backlog_of([(20, SINK)], 500)
    backlog.clear()
    assert backlog.take(decoding_step(), make_pool()) == []


chunks = st.lists(st.tuples(st.integers(1, 80), st.sampled_from([(), (1,), SINK, SINK[::-1]])), max_size=12)


@given(chunks, st.integers(1, 300), st.integers(1, 20))
def test_within_the_budget_and_the_pool_and_nothing_is_lost(waiting, budget, blocks):
    backlog, pool = backlog_of(waiting, budget), make_pool(blocks)
    order = []
    while fills := backlog.take(decoding_step(), pool):
        assert pool.count == blocks
        computed = used = 0
        for fill in fills:
            shared = len(fill.context) // BLOCK
            own = [len(fill.context) - shared * BLOCK + len(tokens) for _, tokens in fill.chunks]
            computed += shared * BLOCK + sum(own)
            used += len(fill.blocks[0])
            assert len(fill.blocks[0]) == shared + sum(-(-length // BLOCK) for length in own)
        count = sum(len(fill.chunks) for fill in fills)
        assert computed <= budget or count == 1
        assert used <= blocks
        now = sorted(digest[0] for fill in fills for digest, _ in fill.chunks)
        assert now == list(range(len(order), len(order) + count))
        order += now
    if len(order) < len(waiting):  # the next one has no room even in an empty pool
        length, context = waiting[len(order)]
        assert -(-(len(context) + length) // BLOCK) > blocks
