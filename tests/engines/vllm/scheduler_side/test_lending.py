"""Blocks that are lent for one step: for probing the question, and for filling chunks first."""

import pytest

from kvmosaic.blend.base import PROBE_TOKENS
from tests.engines.vllm.scheduler_side.fakes import BLOCK, FIRST, SECOND, SINK, SYSTEM, Side, make_request, text

PROBED = {"recompute_ratio": 0.25, "policy": "composite"}
FREE = 200


def ask(*chunks, question=10, **params):
    return make_request("request", SYSTEM, *chunks, text(91, question), **params)


def lent(side, request, local=0, more=0):
    """The blocks that a request borrows in addition to its own. All are returned when the step is planned."""
    free = side.pool.get_num_free_blocks()
    _, owned = side.begin(request, local, more)
    borrowed = free - len(owned) - side.pool.get_num_free_blocks()
    [load] = side.step().loads
    assert load.blocks == (tuple(owned),)
    assert len(load.spare) == len(set(load.spare)) == borrowed
    assert not set(load.spare) & set(owned)
    assert side.pool.get_num_free_blocks() == free - len(owned)
    return borrowed


def stored(shape=None, **settings):
    """A side whose steps have room for all that these tests fill at once."""
    side = Side(shape={"step_tokens": 512, **(shape or {})}, **settings)
    side.store(FIRST, SECOND)
    return side


def test_who_neither_probes_nor_fills_borrows_nothing():
    side = stored()
    assert lent(side, side.add(ask(FIRST, SECOND))) == 0


@pytest.mark.parametrize(
    ("question", "more", "expected"),
    [
        (10, 0, 0),  # 110 tokens, in 7 blocks as 100 tokens are
        (13, 0, 1),
        (13, 13, 0),  # the step computes the question, and has blocks for it
        (60, 20, 2),
        (PROBE_TOKENS + 50, 0, -(-(100 + PROBE_TOKENS) // BLOCK) - 7),  # not for all of it
    ],
)
def test_the_part_of_the_question_that_is_probed_needs_blocks(question, more, expected):
    side = stored()
    assert lent(side, side.add(ask(FIRST, SECOND, question=question, **PROBED)), more=more) == expected


def test_a_policy_that_does_not_look_borrows_nothing():
    side = stored()
    request = side.add(ask(FIRST, SECOND, question=100, recompute_ratio=0.25, policy="sink-link"))
    assert lent(side, request) == 0


@pytest.mark.parametrize(
    ("chunks", "local", "expected"),
    [
        ((FIRST, SECOND), 0, 0),  # all stored
        ((text(5, 300),), 0, 0),  # its own blocks have room, because no text comes before it there
        ((FIRST, text(5, 14)), 64, 2 - 1),
        ((FIRST, SECOND, text(5, 14)), 96, 2 - 2),
        ((text(5, 120), text(6, 18)), 128, -(-(len(SINK) + 120) // BLOCK) - 2),
        ((text(5, 120), text(6, 18)), 144, -(-(len(SINK) + 18) // BLOCK) - 1),  # the first is not needed any more
    ],
)
def test_the_longest_chunk_that_is_filled_first_needs_blocks_that_are_not_shared(chunks, local, expected):
    side = stored(miss_policy="fill-first")
    assert lent(side, side.add(ask(*chunks)), local) == expected


def test_nothing_is_lent_for_chunks_that_never_fit():
    side = stored(miss_policy="fill-first", shape={"max_positions": 100})
    chunks = text(5, 98), text(6, 17)
    assert lent(side, side.add(ask(*chunks)), 112) == -(-(len(SINK) + 17) // BLOCK) - 2 == 0
    side = stored(miss_policy="fill-first", shape={"max_positions": 101})
    assert lent(side, side.add(ask(*chunks)), 112) == -(-101 // BLOCK) - 2


def test_background_fills_borrow_for_themselves():
    side = stored()
    assert lent(side, side.add(ask(FIRST, text(5, 120), text(6, 18))), 144) == 0


def test_the_larger_need_counts():
    both = {"miss_policy": "fill-first"}
    side = stored(**both)
    request = side.add(ask(text(5, 120), text(6, 18), question=20, **PROBED))
    assert lent(side, request, 128) == 8 - 2
    side = stored(**both)
    request = side.add(ask(text(5, 120), text(6, 18), question=200, **PROBED))
    assert lent(side, request, 128) == -(-(158 + 200) // BLOCK) - 10


@pytest.mark.parametrize(("free", "expected"), [(6, 6), (5, 1), (1, 1), (0, 0)])
def test_a_need_that_the_pool_cannot_meet_is_left_out(free, expected):
    """Filling needs six blocks, and probing one."""
    side = Side(miss_policy="fill-first", blocks=10 + free, shape={"step_tokens": 512})
    request = side.add(ask(text(5, 120), text(6, 18), question=10, **PROBED))
    assert lent(side, request, 128) == expected


def test_blocks_of_several_requests_are_not_the_same_and_all_come_back():
    side = stored(shape={"step_tokens": 256})
    requests = [
        side.add(make_request(name, SYSTEM, FIRST, SECOND, text(9, 100), recompute_ratio=0.01)) for name in "ab"
    ]
    owned = [side.begin(request)[1] for request in requests]
    loads = side.step().loads
    used = [block for load in loads for block in load.spare] + [block for blocks in owned for block in blocks]
    assert len(used) == len(set(used)) > 14
    assert side.pool.get_num_free_blocks() == FREE - 14
    assert not side.step().loads
    assert side.pool.get_num_free_blocks() == FREE - 14


def test_background_fills_get_blocks_that_no_load_of_the_step_borrowed():
    side = stored(shape={"step_tokens": 256})
    side.matched(side.add(make_request("missing", SYSTEM, text(7, 40), text(9, 9))))
    request = side.add(ask(FIRST, SECOND, question=100, **PROBED))
    _, owned = side.begin(request)
    work = side.run()
    [load], [fill] = work.loads, work.fills
    assert load.spare
    assert not set(fill.blocks[0]) & {*load.spare, *owned}
    assert side.pool.get_num_free_blocks() == FREE - len(owned)
