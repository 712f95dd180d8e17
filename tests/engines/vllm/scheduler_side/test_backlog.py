"""The chunks that the backlog hands out with a step, with a real pool of blocks and real scheduler output."""

import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from kvmosaic.engines.vllm.compat.scheduling import FreeBlocks, Step
from kvmosaic.engines.vllm.messages import Adapter, Line
from kvmosaic.engines.vllm.scheduler_side import askers, fair_queue
from kvmosaic.engines.vllm.scheduler_side.backlog import MAX_LOOKS, ONCE_SECONDS, OVERDUE_SECONDS, FillBacklog
from kvmosaic.engines.vllm.scheduler_side.fair_queue import LEAST_WEIGHT, MAX_TRIES, MAX_WAITING_TOKENS, WaitingChunk
from tests.engines.vllm.scheduler_side.fakes import (
    BLOCK,
    QUESTION,
    STEP,
    SYSTEM,
    Side,
    ask_about,
    make_request,
    make_shape,
    text,
)

SINK = tuple(range(40))
SHARED, REST = 32, 8
"""Number of the sink's tokens in full blocks, and number of those behind them."""
RESERVE = STEP // BLOCK + 1
"""Blocks that are left to vLLM while a chunk is filled in slices, and one request runs."""


def make_pool(blocks=1000):
    return FreeBlocks(BlockPool(blocks + 1, enable_caching=False, hash_block_size=BLOCK))  # one is never handed out


def step_of(**tokens):
    """A step in which the scheduler planned some tokens of each request."""
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = tokens, sum(tokens.values())
    return Step.of(output)


DECODING = step_of(request=1)


def missing(number, length, context=SINK, request="request"):
    digest = number if isinstance(number, bytes) else number.to_bytes(4, "big")
    return WaitingChunk(request, digest, (int.from_bytes(digest[:4], "big"),) * length, context)


def backlog_of(*chunks, request="request"):
    """``chunks`` are pairs of length and context, of one request."""
    backlog = FillBacklog(make_shape())
    backlog.add([missing(number, *chunk, request) for number, chunk in enumerate(chunks)])
    return backlog


def taken(fills):
    return [[(int.from_bytes(digest, "big"), len(tokens)) for digest, tokens in fill.chunks] for fill in fills]


def whole(backlog, step=DECODING, pool=None, room=500):
    """The chunks that a step fills, none of them in slices."""
    fills, part = backlog.take(step, pool or make_pool(), room)
    assert part is None
    return fills


def test_each_further_context_costs_one_more_pass():
    other = tuple(range(100, 140))
    chunks = [(20, SINK), (20, other), (20, SINK)]
    alone, beside = SHARED + REST + 20, REST + 20
    for pass_tokens, expected in ((0, [[(0, 20), (2, 20)], [(1, 20)]]), (100, [[(0, 20)]])):
        backlog = backlog_of(*chunks)
        fills, _ = backlog.take(DECODING, make_pool(), 2 * alone + beside, pass_tokens=pass_tokens)
        assert taken(fills) == expected
        assert len(backlog) == len(chunks) - sum(map(len, expected))  # those that are left keep their turns


def test_chunks_beside_a_slice_cost_one_more_pass():
    for pass_tokens, expected in ((0, [[(1, 20)]]), (100, [])):
        backlog = backlog_of((600, SINK), (20, SINK))
        fills, part = backlog.take(DECODING, make_pool(), 200, pass_tokens=pass_tokens)
        assert len(part.tokens) == 100
        assert taken(fills) == expected


def test_chunks_of_one_context_are_filled_together_in_blocks_for_all_of_them():
    fills = whole(backlog_of((20, SINK), (8, SINK), (9, SINK)))
    assert taken(fills) == [[(0, 20), (1, 8), (2, 9)]]
    [fill] = fills
    assert fill.context == SINK
    assert len(fill.blocks[0]) == SHARED // BLOCK + 2 + 1 + 2


def test_the_context_is_charged_once_as_far_as_it_is_computed_once():
    cost = SHARED + 3 * (REST + 10)
    for room, count in ((cost, 3), (cost - 1, 2)):
        backlog = backlog_of(*[(10, SINK)] * 3)
        assert [len(fill.chunks) for fill in whole(backlog, room=room)] == [count]
        assert sum(len(fill.chunks) for fill in whole(backlog, room=room)) == 3 - count


def test_chunks_of_several_contexts_are_several_groups_oldest_first():
    other = tuple(range(100, 150))
    fills = whole(backlog_of((5, SINK), (6, other), (7, SINK), (8, ())))
    assert taken(fills) == [[(0, 5), (2, 7)], [(1, 6)], [(3, 8)]]
    assert [fill.context for fill in fills] == [SINK, other, ()]
    blocks = [block for fill in fills for block in fill.blocks[0]]
    assert len(blocks) == len(set(blocks))


def test_a_step_that_computes_prompts_or_nothing_fills_nothing():
    backlog = backlog_of((20, SINK))
    for step in (step_of(prompt=2), step_of(), step_of(prompt=30, one=1)):
        assert whole(backlog, step) == []
    assert backlog.take(DECODING, make_pool(), 500, is_full=True) == ([], None)
    assert len(backlog) == 1
    both = step_of(one=1, two=1)
    assert whole(backlog, both) == []  # the step before may still compute a first token
    assert whole(backlog, step_of()) == []
    assert len(whole(backlog, both)) == 1
    assert len(backlog) == 0


def test_what_is_asked_for_again_and_waited_for_long_is_filled_with_any_step_that_computes(monkeypatch):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog = backlog_of((20, SINK), (30, SINK))
    now += 10 * OVERDUE_SECONDS
    backlog.add([missing(1, 30)])
    assert whole(backlog, step_of(prompt=30)) == []  # the same request asks again when it is preempted
    backlog.add([missing(1, 30, request="other")])
    now += OVERDUE_SECONDS
    assert whole(backlog, step_of(prompt=30)) == []
    now += 0.1
    assert taken(whole(backlog, step_of(prompt=30))) == [[(1, 30)]]
    assert whole(backlog, step_of(prompt=30)) == []  # the other may never be asked for again
    assert len(backlog) == 1


def test_what_is_wanted_is_filled_while_vllm_computes_nothing():
    """The only request may be waiting for it."""
    backlog = backlog_of((20, SINK), (30, SINK))
    assert whole(backlog, step_of(prompt=30)) == []
    backlog.add([missing(1, 30)], is_awaited=True)
    assert whole(backlog, step_of()) == []  # the step before may still compute a first token
    assert backlog.take(step_of(), make_pool(), 500, others_run=True) == ([], None)
    assert backlog.take(step_of(), make_pool(), 500, is_full=True) == ([], None)
    assert whole(backlog, step_of()) == []
    assert taken(whole(backlog, step_of())) == [[(1, 30)]]
    assert whole(backlog, step_of()) == []


def test_a_long_chunk_keeps_its_blocks_while_vllm_computes_nothing_if_it_is_wanted():
    for is_awaited in (True, False):
        backlog, pool = backlog_of(), make_pool()
        backlog.add([missing(1, 90)], is_awaited=is_awaited)
        free = pool.count
        _, begun = backlog.take(DECODING, pool, 40)
        assert begun.start == 0
        _, more = backlog.take(step_of(), pool, 40)
        assert (more is not None) is (pool.count < free) is is_awaited


def test_what_its_request_waits_for_is_filled_with_any_step_that_computes(monkeypatch):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog = backlog_of((20, SINK), (30, SINK))
    backlog.add([missing(1, 30), missing(2, 40)], is_awaited=True)
    assert len(backlog) == 3
    now += OVERDUE_SECONDS + 0.1
    assert taken(whole(backlog, step_of(prompt=30))) == [[(1, 30), (2, 40)]]


def test_a_long_chunk_that_is_asked_for_again_goes_on_with_any_step(monkeypatch):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pool = make_pool()
    for is_wanted in (True, False):
        backlog = backlog_of((300, SINK))
        if is_wanted:
            backlog.add([missing(0, 300, request="other")])
        assert backlog.take(DECODING, pool, 64)[1] is not None
        now += 2 * OVERDUE_SECONDS
        assert (backlog.take(step_of(prompt=30), pool, 64)[1] is not None) == is_wanted
        backlog.let_go(pool)
        assert (backlog.take(step_of(prompt=30), pool, 64)[1] is not None) == is_wanted
        backlog.clear(pool)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_long_chunk_that_is_begun_may_be_asked_for_again(monkeypatch, is_awaited):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog, pool = backlog_of((300, SINK)), make_pool()
    assert backlog.take(DECODING, pool, 64)[1] is not None
    backlog.add([missing(0, 300, request="request" if is_awaited else "other")], is_awaited=is_awaited)
    assert len(backlog) == 1
    now += OVERDUE_SECONDS + 0.1
    assert backlog.take(step_of(prompt=30), pool, 64)[1] is not None
    backlog.let_go(pool)
    assert backlog.take(step_of(prompt=30), pool, 64)[1] is not None


def test_a_request_that_has_a_chunk_twice_asks_for_it_once():
    backlog = backlog_of((20, SINK))
    backlog.add([missing(0, 20, request="other"), missing(0, 20, request="other"), missing(1, 30), missing(1, 30)])
    assert len(backlog) == 2
    assert taken(whole(backlog)) == [[(0, 20), (1, 30)]]
    assert len(backlog) == 0


def test_what_nobody_asks_for_again_is_dropped_some_time(monkeypatch):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog, pool = backlog_of((20, SINK), (30, SINK), (40, SINK)), make_pool()
    backlog.add([missing(1, 30, request="other")])
    now += ONCE_SECONDS
    backlog.add([missing(3, 50)])
    assert backlog.use_adapters(frozenset(), pool) == 0
    now += 0.1
    assert backlog.use_adapters(frozenset(), pool) == 2
    assert taken(whole(backlog)) == [[(1, 30), (3, 50)]]


@pytest.mark.parametrize("why", ["dropped", "too many"])
def test_what_is_asked_for_every_few_minutes_is_filled_on_a_busy_server(monkeypatch, why):
    """It is no longer waiting when it is asked for again."""
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog, pool, busy = backlog_of((20, SINK)), make_pool(), step_of(prompt=30)
    if why == "too many":
        backlog.add([missing(1 + number, MAX_WAITING_TOKENS // 2) for number in range(3)])
        assert len(backlog) == 1
    now += 3 * ONCE_SECONDS
    backlog.use_adapters(frozenset(), pool)
    assert len(backlog) == 0
    backlog.add([missing(0, 20, request="other"), missing(9, 20, request="other")])
    now += OVERDUE_SECONDS + 0.1
    assert taken(whole(backlog, busy, pool)) == [[(0, 20)]]
    backlog.add([missing(0, 20, request="third")])  # after it was evicted
    now += OVERDUE_SECONDS + 0.1
    assert whole(backlog, busy, pool) == []


def test_few_askers_are_remembered(monkeypatch):
    monkeypatch.setattr(askers, "MAX_REMEMBERED", 10)
    backlog = backlog_of(*[(20, SINK)] * 30)
    assert len(backlog._askers._first) == 10
    backlog.take(DECODING, make_pool(), 10**6)
    backlog.add([missing(99, 300)])
    assert len(list(slices(backlog, make_pool(), 64))) > 1
    assert len(backlog) == len(backlog._askers._first) == 0


def test_a_long_chunk_that_one_request_asked_for_makes_way_for_one_that_is_wanted(monkeypatch):
    """Only in steps that are not quiet: there it would take half of the room, and is never to be filled at all."""
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog, pool, busy = backlog_of((300, SINK)), make_pool(), step_of(prompt=30)
    assert backlog.take(DECODING, pool, 64)[1].start == 0
    assert backlog.take(DECODING, pool, 64)[1].start == 64
    backlog.add([missing(1, 400)], is_awaited=True)
    assert backlog.take(DECODING, pool, 64)[1].digest == (0).to_bytes(4, "big")
    assert backlog.take(busy, pool, 64) == ([], None)
    now += OVERDUE_SECONDS + 0.1
    parts = list(slices(backlog, pool, 64, busy))
    assert [part.digest for part in parts] == [(1).to_bytes(4, "big")] * 7
    assert pool.count == 1000
    assert len(backlog) == 1


def test_a_busy_step_looks_at_few_of_the_chunks_that_wait(monkeypatch):
    now, seen = 50.0, list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog, pool = FillBacklog(make_shape()), make_pool()
    mine = [Adapter(number, bytes([number]) * 32) for number in range(20)]
    backlog.use_adapters(frozenset(mine), pool)
    backlog.add([missing(number, 16) for number in range(2000)], is_awaited=True)
    backlog.add([missing(5000 + number, 16) for number in range(2000)])
    look = WaitingChunk.__getattribute__
    monkeypatch.setattr(WaitingChunk, "__getattribute__", lambda self, name: seen.append(name) or look(self, name))
    assert whole(backlog, step_of(prompt=30), pool) == []
    assert len(seen) < 20
    backlog.use_adapters(frozenset(mine), pool)
    assert len(seen) < 40
    backlog.use_adapters(frozenset(), pool)
    assert len(seen) < 2 * 4000  # once, however many adapters are no longer active


def test_looking_for_a_chunk_of_an_idle_adapter_does_not_ask_all_others(monkeypatch):
    backlog, tried = FillBacklog(make_shape()), 0

    class Digest(bytes):
        def __hash__(self):
            nonlocal tried
            tried += 1
            return super().__hash__()

    for number in range(1000):
        backlog.add([replace(missing(number, 16), adapter=Adapter(number, bytes(32)))])
    backlog.add([WaitingChunk("other", Digest(b"0000"), (1,), (), Adapter(1, bytes(32)))])
    assert 0 < tried < 30


def test_chunks_of_an_idle_adapter_may_be_asked_for_again(monkeypatch):
    now, mine = 50.0, Adapter(1, bytes(32))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    backlog, pool = FillBacklog(make_shape()), make_pool()
    for request in ("one", "two"):
        backlog.add([replace(missing(0, 20, request=request), adapter=mine)])
    assert len(backlog) == 1
    now += OVERDUE_SECONDS + 0.1
    backlog.use_adapters(frozenset([mine]), pool)
    assert taken(whole(backlog, step_of(prompt=30))) == [[(0, 20)]]


def test_a_wanted_chunk_that_cannot_be_begun_delays_no_other():
    backlog, pool = backlog_of((4000, ()), (300, ()), (20, ())), make_pool(100)
    backlog.add([missing(0, 4000, ())], is_awaited=True)
    parts = []
    for _ in range(12):
        fills, part = backlog.take(DECODING, pool, 64)
        parts += [part.digest[-1]] if part else []
        parts += [number for fill in taken(fills) for number, _ in fill]
    assert set(parts) == {1, 2}


def test_steps_with_drafts_are_quiet():
    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"one": 4, "two": 1}, 5
    output.scheduled_spec_decode_tokens = {"one": [-1, -1, -1]}
    assert Step.of(output).only_decodes
    assert len(whole(backlog_of((20, SINK)), Step.of(output))) == 1
    output.num_scheduled_tokens["two"] = 2
    assert not Step.of(output).only_decodes


@pytest.mark.parametrize("fields", [{"new": frozenset(["one"])}, {"resumed": frozenset(["one"])}])
def test_a_step_that_begins_a_request_is_not_quiet(fields):
    """vLLM's prefix cache may have all of its prompt but one token."""
    assert not replace(step_of(one=1, two=1), **fields).only_decodes


def test_a_chunk_that_several_requests_lack_is_filled_once_and_first():
    backlog = backlog_of((20, SINK), (30, SINK))
    backlog.add([missing(1, 30, request="other")])
    backlog.add([missing(1, 30, request="third")])
    assert len(backlog) == 2
    assert taken(whole(backlog)) == [[(1, 30), (0, 20)]]


@pytest.mark.parametrize("room", [500, 60])
def test_a_cleared_backlog_fills_nothing_and_has_no_blocks(room):
    backlog, pool = backlog_of((20, SINK), (80, SINK), (20, SINK)), make_pool()
    backlog.take(DECODING, pool, room)
    backlog.take(DECODING, pool, room)
    backlog.clear(pool)
    assert whole(backlog, room=room) == []
    assert len(backlog) == 0
    assert pool.count == 1000


# --- in turns


def test_requests_take_turns():
    backlog = FillBacklog(make_shape())
    backlog.add([missing(number, 16, ()) for number in range(6)])
    backlog.add([missing(10 + number, 16, (), "other") for number in range(2)])
    backlog.add([missing(20, 16, (), "third")])
    order = []
    while fills := whole(backlog, room=48):
        order += [number for fill in taken(fills) for number, _ in fill]
    assert order == [0, 10, 20, 1, 11, 2, 3, 4, 5]


def test_a_request_with_thousands_of_chunks_delays_anothers_by_one_turn():
    backlog = FillBacklog(make_shape())
    backlog.add([missing(number, 16, ()) for number in range(3000)])
    for _ in range(5):
        whole(backlog, room=32)
    backlog.add([missing(9999, 16, (), "innocent")])
    first = [number for fill in taken(whole(backlog, room=32)) for number, _ in fill]
    assert first == [10, 9999]


def test_too_many_chunks_and_the_longest_queue_loses_its_oldest():
    backlog, most = FillBacklog(make_shape()), MAX_WAITING_TOKENS // LEAST_WEIGHT
    backlog.add([missing(1_000_000, 16, (), "innocent")])
    for request in range(3):
        first = 100_000 * request
        backlog.add([missing(first + number, 16, (), str(request)) for number in range(most - 1)])
        assert len(backlog) == most
    backlog.add([missing(2_000_000, 16, (), "late")])
    assert len(backlog) == most
    left = [number for fill in taken(whole(backlog, pool=make_pool(10_000), room=10**6)) for number, _ in fill]
    assert {1_000_000, 2_000_000} <= set(left)
    by_request = [sorted(number for number in left if number // 100_000 == request) for request in range(3)]
    sizes = [len(each) for each in by_request]
    assert max(sizes) - min(sizes) <= 1
    assert [each[-1] for each in by_request] == [100_000 * request + most - 2 for request in range(3)]  # the newest


def test_long_chunks_weigh_more(monkeypatch):
    monkeypatch.setattr(fair_queue, "MAX_WAITING_TOKENS", 10_000)
    backlog = FillBacklog(make_shape())
    backlog.add([missing(1, 16, (), "innocent")])
    backlog.add([missing(2 + number, 4000, ()) for number in range(5)])
    assert len(backlog) == 3
    assert taken(whole(backlog)) == [[(1, 16)]]


# --- chunks that do not fit


def test_those_behind_one_that_is_too_large_do_not_starve():
    for others in ("request", "other"):
        backlog = backlog_of((400, SINK))
        backlog.add([missing(1, 20, SINK, others)])
        assert taken(whole(backlog, pool=make_pool(10))) == [[(1, 20)]]
        assert len(backlog) == 1  # it waits for more blocks
        assert taken(whole(backlog)) == [[(0, 400)]]


def test_many_that_are_too_large_are_not_all_looked_at_in_every_step():
    backlog = backlog_of(*[(400, ())] * 200)
    backlog.add([missing(1000, 20, (), "other")])
    assert taken(whole(backlog, pool=make_pool(10))) == [[(1000, 20)]]
    looks = [chunk.tries for chunk in backlog._asked_once._waiting.values()]
    assert sum(looks) <= 2 * MAX_LOOKS


@pytest.mark.parametrize("length", [400, 4000])
def test_what_never_fits_is_forgotten_some_time(length):
    backlog, pool = backlog_of((length, ())), make_pool(10)
    for _ in range(MAX_TRIES // 2 - 1):
        whole(backlog, pool=pool)
    assert len(backlog) == 1
    for _ in range(MAX_TRIES // 2 + 1):
        whole(backlog, pool=pool)
    assert len(backlog) == 0


@pytest.mark.parametrize("length", [400, 4000])
def test_a_step_counts_as_one_try(length):
    """This holds also for the only chunk of a request, whose turn comes again while chunks of others are looked
    at."""
    backlog, pool = backlog_of((length, ())), make_pool(10)
    backlog.add([missing(1 + number, length, (), "other") for number in range(100)])
    for step in range(1, 6):
        assert whole(backlog, pool=pool) == []
        waiting = {chunk.digest: chunk for chunk in backlog._asked_once._waiting.values()}
        assert waiting[bytes(4)].tries == step


def test_others_use_a_step_s_room_beside_one_that_cannot_be_begun():
    backlog = backlog_of((4000, ()))
    backlog.add([missing(1 + number, 16, (), "other") for number in range(8)])
    pool = make_pool(20)
    assert taken(whole(backlog, pool=pool, room=64)) == [[(1, 16), (2, 16), (3, 16), (4, 16)]]
    assert taken(whole(backlog, pool=pool, room=64)) == [[(5, 16), (6, 16), (7, 16), (8, 16)]]


def test_a_long_chunk_whose_turn_comes_amid_a_step_is_begun_in_the_next():
    backlog = FillBacklog(make_shape())
    backlog.add([missing(1 + number, 16, (), "other") for number in range(100)])
    backlog.add([missing(0, 300, ())])
    pool = make_pool()
    assert taken(whole(backlog, pool=pool, room=64)) == [[(1, 16)]]
    _, part = backlog.take(DECODING, pool, 64)
    assert part is not None
    assert part.digest == bytes(4)


# --- in slices


def slices(backlog, pool, room, step=DECODING):
    """The slices in which a chunk is filled, one in each step."""
    while True:
        fills, part = backlog.take(step, pool, room)
        if part is None:
            assert not fills
            return
        yield part


def test_a_chunk_that_is_too_long_for_a_step_is_filled_in_slices_that_keep_their_blocks():
    backlog, pool = backlog_of((300, SINK)), make_pool()
    parts = []
    for part in slices(backlog, pool, 64):
        parts.append(part)
        assert pool.count == (1000 if part.is_last else 1000 - len(part.blocks[0]))
    assert [len(part.tokens) for part in parts] == [64] * 5 + [20]
    assert [part.start for part in parts] == list(range(0, 340, 64))
    assert tuple(token for part in parts for token in part.tokens) == (*SINK, *[0] * 300)
    assert {part.blocks for part in parts} == {parts[0].blocks}
    assert len(parts[0].blocks[0]) == -(-340 // BLOCK)
    assert [part.is_last for part in parts] == [False] * 5 + [True]
    assert {(part.digest, part.context_tokens) for part in parts} == {(bytes(4), 40)}


def test_others_go_on_meanwhile():
    backlog, pool = backlog_of((300, SINK)), make_pool()
    backlog.add([missing(10 + number, 16, (), "other") for number in range(8)])
    backlog.add([missing(50, 200, (), "third")])
    seen = []
    for _ in range(20):
        fills, part = backlog.take(DECODING, pool, 64)
        assert (
            sum(len(tokens) for fill in fills for _, tokens in fill.chunks) + len(part.tokens if part else ()) <= 64
        )
        seen.append(([number for fill in taken(fills) for number, _ in fill], part and part.digest[-1]))
    assert seen[:4] == [([10, 11], 0), ([12, 13], 0), ([14, 15], 0), ([16, 17], 0)]
    assert {0, 50} == {digest for _, digest in seen if digest is not None}
    assert len(backlog) == 0
    assert pool.count == 1000


def test_a_chunk_that_is_being_filled_is_not_noted_again():
    backlog, pool = backlog_of((300, SINK)), make_pool()
    backlog.take(DECODING, pool, 64)
    backlog.add([missing(0, 300, SINK, "other")])
    assert len(backlog) == 1


@pytest.mark.parametrize("why", ["idle", "short"])
def test_blocks_are_given_back_when_vllm_may_need_them(why):
    backlog, pool = backlog_of((300, SINK)), make_pool()
    for _ in range(3):
        backlog.take(DECODING, pool, 64)
    held = 1000 - pool.count
    assert held == -(-340 // BLOCK)
    others = pool.borrow(pool.count - RESERVE + 1) if why == "short" else None
    assert backlog.take(step_of() if why == "idle" else DECODING, pool, 64) == ([], None)
    assert pool.count == held + (RESERVE - 1 if others else 1000 - held)
    if others:
        pool.give_back(others)
    parts = list(slices(backlog, pool, 64))
    assert (parts[0].start, parts[-1].is_last) == (0, True)  # from the beginning
    assert pool.count == 1000


def test_an_empty_step_between_those_of_other_stages_gives_nothing_back():
    backlog, pool = backlog_of((300, SINK)), make_pool()
    _, first = backlog.take(DECODING, pool, 64)
    held = 1000 - pool.count
    assert backlog.take(step_of(), pool, 64, others_run=True) == ([], None)
    assert 1000 - pool.count == held > 0
    _, second = backlog.take(DECODING, pool, 64)
    assert second.start == first.start + len(first.tokens)
    assert second.blocks == first.blocks


def test_slices_leave_room_for_what_vllm_computes_in_a_step():
    need = -(-340 // BLOCK)
    backlog = backlog_of((300, SINK))
    assert backlog.take(DECODING, make_pool(need + RESERVE - 1), 64) == ([], None)
    assert backlog.take(DECODING, make_pool(need + RESERVE), 64)[1] is not None


@pytest.mark.parametrize(("positions", "is_filled"), [(43, True), (42, False)])
def test_a_chunk_that_the_model_has_too_few_positions_for_is_not_filled(positions, is_filled):
    """It is computed after 3 tokens."""
    side = Side(shape={"max_positions": positions, "step_tokens": 256})
    side.matched(side.add(make_request("request", SYSTEM, text(5, 40), QUESTION)))
    assert any(work.fills or work.fill_slice for work in (side.run(), side.run())) is is_filled


def test_vllm_can_empty_its_prefix_cache_in_between():
    side = Side()
    side.matched(side.add(make_request("request", SYSTEM, text(5, 300), QUESTION)))
    assert [side.run().fill_slice.start for _ in range(3)] == [0, 32, 64]
    assert side.pool.get_num_free_blocks() < 200
    assert side.pool.reset_prefix_cache()
    assert side.pool.get_num_free_blocks() == 200
    assert side.run().fill_slice.start == 0  # from the beginning


chunks = st.lists(st.tuples(st.integers(1, 80), st.sampled_from([(), (1,), SINK, SINK[::-1]])), max_size=12)


@given(st.lists(chunks, max_size=3), st.integers(1, 300), st.integers(1, 30))
@example([[(57, SINK)] * 4], 1, 12)  # the last one waits for 291 steps
def test_within_room_and_pool_and_nothing_is_lost(requests, room, blocks):
    backlog, pool = FillBacklog(make_shape()), make_pool(blocks)
    lengths = {}
    for index, waiting in enumerate(requests):
        for number, (length, context) in enumerate(waiting):
            lengths[1000 * index + number] = len(context) + length
            backlog.add([missing(1000 * index + number, length, context, str(index))])
    done, idle = [], 0
    while idle < 3 * len(lengths) + 3:
        fills, part = backlog.take(DECODING, pool, room)
        computed = used = 0
        for fill in fills:
            shared = len(fill.context) // BLOCK
            own = [len(fill.context) - shared * BLOCK + len(tokens) for _, tokens in fill.chunks]
            computed += shared * BLOCK + sum(own)
            used += len(fill.blocks[0])
            assert len(fill.blocks[0]) == shared + sum(-(-length // BLOCK) for length in own)
            done += [int.from_bytes(digest, "big") for digest, _ in fill.chunks]
        if part is not None:
            computed, used = computed + len(part.tokens), used + len(part.blocks[0])
            done += [int.from_bytes(part.digest, "big")] if part.is_last else []
        assert computed <= room
        assert used <= blocks
        idle = 0 if computed else idle + 1
    assert len(done) == len(set(done))
    assert pool.count == blocks
    for number in lengths.keys() - set(done):  # they have no room even in an empty pool
        length = lengths[number]
        assert -(-length // BLOCK) + (RESERVE if length > room else 0) > blocks


# --- how much of a step


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({}, 1000),
        ({"blend": Line(0, 1)}, 1000),
        ({"fill": Line(0, 1)}, 1000),
        ({"fill": Line(500, 1)}, 750),  # half of 2500 s
        ({"fill": Line(0, 1), "blend": Line(0, 0.5)}, 500),
        ({"fill": Line(0, 1), "blend": Line(0, 4)}, 1000),  # blends may have been far from as fast as a prefill is
        ({"fill": Line(10_000, 1)}, 250),  # never nothing
        ({"fill": Line(10, 0)}, 2000),
    ],
)
def test_a_step_fills_for_half_the_time_that_a_full_prefill_takes(costs, expected):
    side = Side(shape={"step_tokens": 2000})
    side.report(costs=costs)
    assert side.scheduler._admission.tokens_worth_filling() == expected


def test_the_slowest_rank_counts():
    side = Side(shape={"step_tokens": 2000, "ranks": 2})
    side.report(rank=0, costs={"fill": Line(0, 1)})
    assert side.scheduler._admission.tokens_worth_filling() == 1000  # the other has measured nothing
    side.report(rank=1, costs={"fill": Line(0, 2), "blend": Line(0, 1)})
    assert side.scheduler._admission.tokens_worth_filling() == 1000
    side.report(rank=0, costs={"fill": Line(0, 1), "blend": Line(0, 0.5)})
    assert side.scheduler._admission.tokens_worth_filling() == 500


@pytest.mark.parametrize(
    ("scheduled", "loaded", "expected"),
    [(0, 0, 1000), (2000, 0, 500), (1500, 500, 500), (2000, 500, 250), (1000, 900, 600), (2000, 1900, 250)],
)
def test_a_step_computes_no_more_than_one_and_a_quarter_full_ones_would(scheduled, loaded, expected):
    """But an eighth of a step may always be filled, because otherwise nothing might ever be filled.

    ``loaded``: number of tokens of a request that is loaded in the same step."""
    side = Side(shape={"step_tokens": 2000}, blocks=2000)
    if loaded:
        stored = text(1, 3000)  # more than what is loaded, so that reuse is worth it
        side.store(stored)
        side.begin(side.add(ask_about(stored, text(5, loaded))))
    assert side.scheduler._admission.tokens_to_fill(scheduled) == pytest.approx(expected, abs=100)


def test_a_learned_sink_takes_blocks_and_no_time():
    """It is placed, so a step has room for more chunks; each still needs its blocks."""
    shape = replace(make_shape(), places_sink=True)
    for chosen, fits in ((make_shape(), 2), (shape, 3)):
        backlog = FillBacklog(chosen)
        backlog.add([missing(number, 24) for number in range(3)])
        [fill], _ = backlog.take(DECODING, make_pool(), SHARED + 2 * (REST + 24))
        assert len(fill.chunks) == fits
        assert len(fill.blocks[0]) >= chosen.blocks_for(SHARED) + fits * chosen.blocks_for(REST + 24)


def test_slices_begin_behind_a_learned_sink():
    backlog = FillBacklog(replace(make_shape(), places_sink=True))
    backlog.add([missing(1, 4 * STEP)])
    pool, starts, count = make_pool(), [], 0
    while len(backlog):
        _, part = backlog.take(DECODING, pool, STEP)
        starts.append(part.start)
        count += len(part.tokens)
    assert starts[0] == len(SINK)
    assert count == 4 * STEP
