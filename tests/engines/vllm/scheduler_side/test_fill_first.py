"""Chunks that are filled before they are used: at once if that takes no more than a step, or half a step beside other
requests; otherwise a part in each step."""

import time

import pytest

from kvmosaic.engines.vllm.scheduler_side.backlog import OVERDUE_SECONDS
from kvmosaic.engines.vllm.scheduler_side.waiting import PATIENCE_SECONDS
from tests.engines.vllm.scheduler_side.fakes import FIRST, SECOND, SINK, STEP, Side, ask_about, digest_of, text


def busy_side() -> Side:
    """A side on which another request is running."""
    side = Side(miss_policy="fill-first")
    side.run()
    return side


def filled(work) -> list[bytes]:
    whole = [digest for fill in work.fills for digest, _ in fill.chunks]
    part = work.fill_slice
    return [*whole, part.digest] if part is not None and part.is_last else whole


def computed(work) -> int:
    part = 0 if work.fill_slice is None else len(work.fill_slice.tokens)
    return part + sum(len(fill.context) + len(tokens) for fill in work.fills for _, tokens in fill.chunks)


def test_alone_a_whole_step_is_filled_at_once():
    side = Side(miss_policy="fill-first", shape={"step_tokens": 80 + len(SINK)})
    request = side.add(ask_about(FIRST, SECOND))
    assert side.begin(request)[0] == 100
    [load] = side.step().loads
    assert load.fill


def test_alone_more_than_a_step_is_filled_over_several():
    """A request that arrives meanwhile waits for one of them."""
    side = Side(miss_policy="fill-first", shape={"step_tokens": 80 + len(SINK) - 1})
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    done = list[bytes]()
    for _ in range(10):
        if side.matched(request) is not None:
            break
        work = side.step()
        assert 0 < computed(work) <= 80
        done += filled(work)
        side.report(dict.fromkeys(done, "host"))
    assert done == [digest_of(FIRST)]  # the load has room for the rest
    assert side.begin(request)[0] == 100
    [load] = side.step().loads
    assert load.fill


def test_little_is_filled_at_once_beside_others():
    side = busy_side()
    request = side.add(ask_about(text(5, STEP // 2 - 4)))
    assert side.matched(request) == 20 + STEP // 2 - 4


def test_nobody_waits_for_a_chunk_that_the_store_has_no_room_for():
    """Otherwise it would be filled in vain for every request."""
    side, long = busy_side(), text(5, 3 * STEP)
    side.report(max_stored_tokens=3 * STEP - 1)
    request = side.add(ask_about(FIRST, long))
    assert side.matched(request) is None  # for the first one
    while not (done := filled(side.run())):
        pass
    assert done == [digest_of(FIRST)]
    side.store(FIRST)
    assert side.matched(request) == 20 + len(FIRST) + 3 * STEP
    side.give(request, 20 + len(FIRST) + 3 * STEP)
    work = side.run()
    assert ([load.is_sliced for load in work.loads], filled(work), work.fill_slice) == ([True], [], None)


def test_requests_that_wait_for_chunks_have_them_queued_again_after_memory_was_emptied():
    side = busy_side()
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    side.scheduler.empty_memory()
    assert side.matched(request) is None
    assert side.run().empties_memory
    side.report(is_all=True)
    waiting = {digest_of(FIRST), digest_of(SECOND)}
    for _ in range(20):
        if not waiting:
            break
        assert side.matched(request) is None
        for digest in filled(side.run()):
            waiting.remove(digest)
            side.report({digest: "host"})
    assert not waiting
    assert side.matched(request) == 100


def test_a_server_without_quiet_steps_fills_what_a_request_waits_for(monkeypatch):
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    side = busy_side()
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    assert not side.run(tokens=5).fills
    now += OVERDUE_SECONDS + 0.1
    found = set[bytes]()
    for _ in range(20):
        found |= set(filled(side.run(tokens=5)))
    assert found == {digest_of(FIRST), digest_of(SECOND)}


def test_much_is_filled_in_steps_that_others_can_wait_for():
    side = busy_side()
    request = side.add(ask_about(FIRST, SECOND))
    waiting = {digest_of(FIRST), digest_of(SECOND)}
    for _ in range(20):
        if not waiting:
            break
        assert side.matched(request) is None
        work = side.run()
        assert not work.loads
        assert computed(work) <= STEP
        for digest in filled(work):
            waiting.remove(digest)
            side.report({digest: "host"})
    assert not waiting
    assert side.begin(request)[0] == 100
    [load] = side.step().loads
    assert load.start == 0
    told = side.ours(request).report
    assert told["mode"] == "fill"
    assert [chunk["status"] for chunk in told["chunks"]] == ["filled", "filled"]
    assert told["reused_tokens"] == 0


def test_nobody_waits_for_what_was_filled_and_evicted_again():
    """The store may have no room for all chunks of a request, or of all requests that wait."""
    side = busy_side()
    request = side.add(ask_about(FIRST, SECOND))
    order = list[bytes]()
    for _ in range(20):
        if side.matched(request) is not None:
            break
        for digest in filled(side.run()):
            side.report({digest: "host"} | dict.fromkeys(order, None))  # the one before is evicted
            order.append(digest)
    assert order == [digest_of(FIRST), digest_of(SECOND)]
    assert side.matched(request) == 100


def test_it_does_not_wait_when_the_others_are_gone():
    side = Side(miss_policy="fill-first", shape={"step_tokens": 80 + len(SINK)})
    side.run()
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    side.step()
    assert side.matched(request) == 100


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    side = busy_side()
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    now += PATIENCE_SECONDS
    assert side.matched(request) == 100


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_what_was_filled_and_not_stored(rank: int):
    side = Side(miss_policy="fill-first", shape={"ranks": 2})
    side.run()
    request = side.add(ask_about(FIRST, SECOND))
    for _ in range(20):
        if side.matched(request) is not None:
            break
        if done := filled(side.run()):
            assert side.matched(request) is None  # as long as the workers have not reported
            side.report(dict.fromkeys(done, "host"), rank=rank)
            side.report(rank=1 - rank, ended_fills=frozenset(done))
    else:
        pytest.fail("it waits for ever")
    assert not side.scheduler._backlog._handed_out
    assert side.ask(request) == (100, True)
    side.give(request, 100)
    [load] = side.run().loads
    assert (load.fill, load.is_sliced) == (False, True), "others would wait until they are filled"
    assert [chunk["status"] for chunk in side.ours(request).report["chunks"]] == ["prefilled", "prefilled"]


def test_nobody_waits_for_a_chunk_that_was_forgotten():
    side = busy_side()
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    assert side.scheduler._pool is not None
    side.scheduler._backlog.clear(side.scheduler._pool)
    assert side.matched(request) == 100


def test_what_another_request_waits_for_is_filled_once():
    side = busy_side()
    both = [side.add(ask_about(FIRST, SECOND, name=name)) for name in "ab"]
    assert [side.matched(request) for request in both] == [None, None]
    assert len(side.scheduler._backlog) == 2
    side.store(FIRST, SECOND)
    assert [side.matched(request) for request in both] == [100, 100]
