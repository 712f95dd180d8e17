"""The workers' part of a step: blocks that the step's own forward writes, and shared blocks."""

from dataclasses import replace

import pytest

from kvmosaic.engines.vllm.compat.scheduling import Step
from kvmosaic.engines.vllm.messages import ChunkLoad, RankReport, StepReport, StepWork
from kvmosaic.engines.vllm.scheduler_side.block_tables import BlockTables
from tests.engines.vllm.scheduler_side.fakes import BLOCK, FIRST, SECOND, Side, ask_about, make_request, text


def load_beside(writes, local=64, *, is_sliced=False, **params):
    """The load of a request that shares its first blocks with another request. The other one's forward in the same
    step writes the tokens ``writes``."""
    side = Side(miss_policy="fill-first")
    side.store(FIRST, SECOND)
    if is_sliced:
        side.run()
    request = side.add(ask_about(FIRST, SECOND, **params))
    external, blocks = side.begin(request, local)
    start, end = writes
    step = Step(
        scheduled={"writer": end - start, "request": 1},
        computed={"writer": start, "request": local + external},
        new=frozenset({"writer", "request"}),
        blocks={"writer": blocks[: -(-end // BLOCK)], "request": blocks},
    )
    [load] = side.scheduler.take_work(step).loads
    return load


@pytest.mark.parametrize(
    ("writes", "start"),
    [
        ((0, 64), 0),
        ((16, 64), 16),
        ((20, 40), 16),  # in the middle of a block
        ((48, 64), 48),
        ((63, 64), 48),
        ((64, 96), 64),  # behind what it shares
        ((0, 0), 64),
    ],
)
def test_a_load_starts_before_blocks_that_the_same_step_writes(writes, start):
    load = load_beside(writes)
    assert load.start == start
    assert load.shared_until == 64


def test_the_requests_own_forward_in_the_step_does_not_count_as_writing_its_prefix():
    side = Side()
    side.store(FIRST, SECOND)
    request = side.add(ask_about(FIRST, SECOND))
    external, blocks = side.begin(request, 64, more=10)
    step = Step(
        scheduled={"request": 10},
        computed={"request": 64 + external},
        new=frozenset({"request"}),
        blocks={"request": blocks},
    )
    [load] = side.scheduler.take_work(step).loads
    assert load.start == 64


def test_a_load_says_whether_it_writes_what_others_are_about_to_use():
    everything = {"recompute_ratio": 1.0}
    whole = load_beside((64, 64), local=0, is_sliced=True, **everything)
    assert (whole.is_sliced, whole.writes_shared) == (True, False)
    shared = load_beside((16, 32), local=32, is_sliced=True, **everything)
    assert (shared.start, shared.is_sliced, shared.writes_shared) == (16, True, True)


def test_work_is_handed_out_once():
    side = Side()
    side.store(FIRST)
    side.begin(side.add(ask_about(FIRST)))
    work = side.step()
    assert (work.engine_id, len(work.loads)) == ("engine", 1)
    assert not work.is_empty
    assert side.step() == StepWork(engine_id="engine")


def test_a_load_says_all_the_worker_needs():
    side = Side(miss_policy="fill-first", shape={"step_tokens": 128})
    side.store(FIRST)
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0.25, policy="random"))
    _, blocks = side.begin(request, 16)
    ours = side.ours(request)
    [load] = side.step().loads
    assert load == ChunkLoad(
        request_id="request",
        prompt=ours.prompt,
        digests=ours.digests,
        ratio=0.25,
        policy="random",
        start=16,
        end=100,
        shared_until=16,
        blocks=(tuple(blocks),),
        spare=(),
        is_findable=True,
        fill=True,
        is_sliced=False,
        is_reported=True,
    )


@pytest.mark.parametrize(("salt", "is_findable"), [(None, True), ("mine", False)])
def test_nothing_is_shared_that_was_loaded_for_a_request_with_a_cache_salt(salt, is_findable):
    side = Side(miss_policy="fill-first")
    side.begin(side.add(ask_about(FIRST, cache_salt=salt)))
    [load] = side.step().loads
    assert load.is_findable is is_findable


@pytest.mark.parametrize(("policy", "fills"), [("background", False), ("never", False), ("fill-first", True)])
def test_workers_fill_first_only_where_that_is_the_policy(policy, fills):
    side = Side(miss_policy=policy)
    side.store(FIRST)
    side.begin(side.add(ask_about(FIRST, SECOND)))
    [load] = side.step().loads
    assert load.fill is fills


# --- messages


def test_a_blends_digest_covers_all_that_a_choice_depends_on():
    side = Side(miss_policy="fill-first", shape={"step_tokens": 256})
    side.begin(side.add(ask_about(FIRST, SECOND, recompute_ratio=0.5)))
    [load] = side.step().loads
    others = [
        replace(load, ratio=0.25),
        replace(load, policy="random"),
        replace(load, prompt=replace(load.prompt, chunks=load.prompt.chunks[:1])),
        replace(load, prompt=replace(load.prompt, token_ids=(*load.prompt.token_ids[:-1], 5))),
        replace(load, digests=tuple(digest[::-1] for digest in load.digests)),  # as of a client that is kept apart
    ]
    assert len({load.blend_digest(), *(each.blend_digest() for each in others)}) == 6
    assert replace(load, start=48, blocks=((1, 2),), request_id="x").blend_digest() == load.blend_digest()


def test_reports_of_all_ranks_are_one():
    reports = [
        RankReport(rank=rank, fastest="host", changes={}, fetched={}, costs={}, is_off=False) for rank in range(3)
    ]
    first, *others = [StepReport([report]) for report in reports]
    for other in others:
        first = first.aggregate(other)
    assert first.ranks == reports


# --- block tables


def test_block_tables_follow_requests_through_their_lives():
    tables = BlockTables(BLOCK)
    tables.follow(Step(new=frozenset("a"), blocks={"a": [5, 6]}))
    assert tables.blocks("a") == [5, 6]
    tables.follow(Step(blocks={"a": [7]}))
    tables.follow(Step(blocks={"a": []}))
    assert tables.blocks("a") == [5, 6, 7]
    tables.follow(Step(resumed=frozenset("a"), blocks={"a": [8]}))
    assert tables.blocks("a") == [8]
    tables.follow(Step(finished=frozenset("a")))
    assert tables.blocks("a") == []
    tables.follow(Step(finished=frozenset("a"), new=frozenset("a"), blocks={"a": [9]}))  # the name is used again
    assert tables.blocks("a") == [9]


@pytest.mark.parametrize(
    ("start", "count", "written"),
    [
        (0, 16, {10}),
        (0, 17, {10, 11}),
        (15, 1, {10}),
        (15, 2, {10, 11}),
        (16, 1, {11}),
        (30, 20, {11, 12, 13}),
        (32, 0, set()),
    ],
)
def test_the_blocks_that_a_step_writes(start, count, written):
    tables = BlockTables(BLOCK)
    tables.follow(Step(new=frozenset("a"), blocks={"a": [10, 11, 12, 13]}))
    step = Step(
        scheduled={"a": count, "b": 16}, computed={"a": start, "b": 0}, blocks={"b": [20]}, new=frozenset("b")
    )
    tables.follow(step)
    assert tables.written_by(step) == written | {20}


def test_who_begins_or_comes_back_was_not_running_before():
    step = Step(computed={"a": 5, "b": 6, "c": 7}, new=frozenset("a"), resumed=frozenset("b"))
    assert BlockTables.running_before(step) == {"c": 7}


def test_a_plain_request_needs_no_work():
    side = Side()
    request = side.add(make_request("plain", text(5, 100)))
    side.begin(request, more=100)
    assert side.step(scheduled={"plain": 100}, computed={"plain": 0}, new=frozenset({"plain"})).is_empty
