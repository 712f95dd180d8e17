"""Loads in slices: the rest of each request is handed out in order."""

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.worker_side.slices import Slices


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 50), st.integers(1, 50))
def test_slices_are_all_there_is_in_order(lengths, at_once, room):
    wanted, runs, at = [], [], 0
    for length in lengths:
        at += 3
        wanted += range(at, at + length)
        runs.append(Run(range(at, at + length), at, [[7]]))
        at += length
    slices, got = Slices(), []
    now = slices.begin("a", runs, at_once)
    for limit in (at_once, *[room] * len(wanted)):
        assert all(list(run.tokens) == list(range(run.start, run.end)) for run in now)
        handed = [token for run in now for token in run.tokens]
        got += handed
        assert slices.take_done(()) == ({"a"} if got == wanted else set())
        if not slices:
            break
        assert len(handed) == limit
        [now] = slices.go_on(room)
    assert got == wanted


def test_slices_that_nobody_wants_are_done():
    slices = Slices()
    for name in "ab":
        slices.begin(name, [Run(range(10), 0, [[7]])], 4)
    assert slices.take_done({"b", "c"}) == {"b"}
    assert [run.start for [run] in slices.go_on(100)] == [4]
    assert slices.take_done({"b"}) == {"a"}
    assert not slices


def test_what_fits_into_the_first_slice_is_done_with_it():
    slices = Slices()
    [run] = slices.begin("a", [Run(range(10), 0, [[7]])], 10)
    assert list(run.tokens) == list(range(10))
    assert not slices
    assert slices.take_done(()) == {"a"}
    assert slices.take_done(()) == set()


def test_a_request_of_which_nothing_is_computed_is_done_at_once():
    slices = Slices()
    assert slices.begin("a", [], 10) == []
    assert slices.take_done(()) == {"a"}


def test_every_request_gets_its_own_room():
    slices = Slices()
    for name in "ab":
        slices.begin(name, [Run(range(10), 0, [[7]])], 4)
    assert [[run.end for run in runs] for runs in slices.go_on(5)] == [[9], [9]]
    assert slices.take_done(()) == set()
    assert [[run.end for run in runs] for runs in slices.go_on(5)] == [[10], [10]]
    assert slices.take_done(()) == {"a", "b"}
    assert slices.go_on(5) == []
