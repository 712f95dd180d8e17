"""Requests whose chunks are in slower tiers: fetches, waiting times, and leftovers."""

import time

import pytest

from kvmosaic.engines.vllm.messages import Line
from kvmosaic.engines.vllm.scheduler_side.patience import LEAST_SECONDS, LEAST_STEPS, MOST_SECONDS, UNMEASURED_SECONDS
from tests.engines.vllm.scheduler_side.fakes import FIRST, SECOND, Side, ask_about, digest_of, make_request, text

REMOTE = {"remote": "valkey://nowhere:6379/0"}
DISK = {"disk_path": "/nowhere"}


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def fetches(work):
    return [(fetch.request_id, fetch.chunks) for fetch in work.fetches]


def of(*chunks):
    return tuple((digest_of(chunk), len(chunk)) for chunk in chunks)


def test_chunks_in_the_fastest_tier_are_brought_at_once():
    side = Side()
    side.store(FIRST, SECOND)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) == 100
    assert side.matched(request, 48) == 52
    assert not side.step().fetches


def test_what_the_prefix_cache_has_up_to_the_question_is_not_brought():
    side = Side()
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    for local in (100, 105):
        assert side.matched(request, local) == 0
    assert not side.step().fetches


def test_chunks_in_a_slower_tier_are_fetched_once_and_waited_for():
    side = Side()
    side.store(FIRST)
    side.store(SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    for _ in range(3):
        assert side.matched(request) is None
    assert fetches(side.step()) == [("request", of(SECOND))]
    assert side.matched(request) is None
    assert not side.step().fetches
    side.store(SECOND)
    side.report(fetched=["request"])
    assert side.matched(request) == 100
    assert not side.step().fetches


def test_a_chunk_that_memory_loses_while_its_request_waits_is_fetched():
    side = Side()
    side.store(FIRST)
    side.store(SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    side.step()
    side.store(FIRST, tier="disk")  # evicted
    side.store(SECOND)
    side.report(fetched=["request"])
    assert side.matched(request) is None
    # The new fetch replaces the earlier one, so it keeps what that brought.
    assert fetches(side.step()) == [("request", of(FIRST, SECOND))]
    assert side.matched(request) is None
    side.store(FIRST)
    side.report(fetched=["request"])
    assert side.matched(request) == 100
    assert not side.step().fetches


def test_a_chunk_is_not_fetched_again_and_again():
    side = Side()
    side.store(FIRST, SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    side.step()
    # Memory has no room for them: they are kept for the request, and the mirror has them on disk.
    side.report(fetched=["request"])
    assert side.matched(request) == 100
    assert not side.step().fetches


@pytest.mark.parametrize("policy", ["background", "fill-first"])
def test_a_chunk_that_a_fetch_does_not_bring_counts_as_missing(policy):
    side = Side(miss_policy=policy)
    side.store(FIRST, SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0))
    assert side.matched(request) is None
    admission, ours = side.scheduler._admission, side.ours(request)
    before = admission.tokens_to_compute(ours, 0)
    side.report(not_brought={"request": frozenset([digest_of(FIRST)])})
    assert not admission.finds_all(ours, 0)
    context = len(ours.context) if policy == "fill-first" else 0
    assert admission.tokens_to_compute(ours, 0) == before + len(FIRST) + context
    assert side.matched(request) == 100
    side.give(request, 100)
    chunks = side.ours(request).report["chunks"]
    assert [chunk["tier"] for chunk in chunks] == [None, "disk"]


def test_a_chunk_that_no_tier_had_is_found_when_it_was_filled():
    """The remote tier was asked for it."""
    side = Side(miss_policy="fill-first", remote="redis://nowhere:1", shape={"step_tokens": 40})
    side.run()  # another request
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0))
    assert side.matched(request) is None
    side.report(not_brought={"request": frozenset(map(digest_of, (FIRST, SECOND)))})
    assert side.matched(request) is None  # it waits until they are filled in the background
    side.store(FIRST, SECOND)
    assert side.scheduler._admission.finds_all(side.ours(request), 0)
    assert side.matched(request) == 100
    side.give(request, 100)
    assert not side.counts("fallbacks")


def test_a_chunk_that_was_lost_and_is_filled_again_is_found():
    side = Side()
    side.store(FIRST, SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    side.report(not_brought={"request": frozenset([digest_of(FIRST)])})
    ours, admission = side.ours(request), side.scheduler._admission
    assert not admission.finds_all(ours, 0)
    side.store(FIRST)
    assert admission.finds_all(ours, 0)


def test_what_any_rank_does_not_bring_counts_as_missing():
    side = Side(shape={"ranks": 2})
    side.store(FIRST, SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    for rank, lost in enumerate((FIRST, SECOND)):
        assert side.matched(request) is None
        side.report(rank=rank, not_brought={"request": frozenset([digest_of(lost)])})
    assert side.matched(request) == 0
    assert side.counts("fallbacks") == {"not-stored": 1}


def test_what_was_lost_is_fetched_again_after_a_preemption():
    side = Side()
    side.store(FIRST, SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0))
    assert side.matched(request) is None
    side.report(not_brought={"request": frozenset([digest_of(FIRST)])})
    assert side.begin(request)[0] == 100
    side.step()
    request.num_preemptions = 1
    assert side.matched(request) is None
    assert fetches(side.step()) == [("request", of(FIRST, SECOND))]
    side.report(fetched=["request"])
    side.begin(request)
    assert [chunk["tier"] for chunk in side.ours(request).report["chunks"]] == ["disk", "disk"]


def test_a_request_that_loses_all_its_chunks_is_prefilled():
    side = Side()
    side.store(FIRST, SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    side.report(not_brought={"request": frozenset(map(digest_of, (FIRST, SECOND)))})
    assert side.matched(request) == 0
    assert side.counts("fallbacks") == {"not-stored": 1}
    assert "request" not in side.scheduler._requests


def test_every_rank_has_to_fetch():
    side = Side(shape={"ranks": 2})
    side.store(FIRST)
    side.store(FIRST, tier="disk", rank=1)
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    side.report(rank=1, fetched=["request"])
    assert side.matched(request) is None
    side.report(rank=0, fetched=["request"])
    assert side.matched(request) == 60


def test_a_chunk_that_one_rank_lacks_is_no_chunk_to_wait_for():
    side = Side(shape={"ranks": 2})
    side.store(FIRST)
    side.store(SECOND, tier="disk", rank=1)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) == 100


def test_a_set_that_cannot_shrink_in_this_model_is_not_loaded():
    """Once workers have found that: they would compute all of a prompt in one step."""
    shrinking = {"recompute_ratio": 0.2, "policy": "kv-deviation(layers=1+2)"}
    side = Side()
    side.store(FIRST, SECOND)
    assert side.matched(side.add(ask_about(FIRST, SECOND, name="first", **shrinking))) == 100
    side.report(cannot_narrow=True)
    assert side.matched(side.add(ask_about(FIRST, SECOND, name="second", **shrinking))) == 0
    assert side.counts("fallbacks") == {"shrinking-set": 1}
    one_layer = shrinking | {"policy": "kv-deviation(layers=1)"}
    assert side.matched(side.add(ask_about(FIRST, SECOND, name="third", **one_layer))) == 100


def test_only_chunks_behind_the_prefix_cache_are_fetched():
    side = Side()
    side.store(FIRST, SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request, 64) is None
    assert fetches(side.step()) == [("request", of(SECOND))]


def test_before_all_ranks_have_told_what_they_have_requests_wait():
    side = Side(shape={"ranks": 2}, is_known=False)
    request = side.add(ask_about(FIRST))
    side.store(FIRST, rank=0)
    assert side.matched(request) is None
    assert not side.step().fetches
    side.store(FIRST, rank=1)
    assert side.matched(request) == 60


def test_after_memory_was_emptied_requests_wait_until_all_ranks_have_told_again():
    side = Side(shape={"ranks": 2})
    side.store(FIRST)
    side.scheduler.empty_memory()
    request = side.add(ask_about(FIRST))
    for rank in range(2):
        assert side.matched(request) is None
        side.report({digest_of(SECOND): "host"}, rank=rank, is_all=True)
    assert side.matched(request) == 0
    assert side.counts("fallbacks") == {"not-stored": 1}


def test_patience_ends_and_the_request_is_prefilled(clock, caplog):
    side = Side()
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST))
    clock.now += 500  # it may have stood in the queue for long before it is asked for
    assert side.matched(request) is None
    clock.now += UNMEASURED_SECONDS - 0.1
    assert side.matched(request) is None
    clock.now += 0.1
    assert side.ask(request) == (0, False)
    assert f"waited {UNMEASURED_SECONDS} s" in caplog.text
    assert side.counts("fallbacks") == {"slow-tier": 1}
    assert side.counts("requests") == {"plain": 1}
    assert side.step().released == ["request"]
    assert side.matched(request) == 0
    told = side.scheduler.finished(request)
    assert (told["mode"], told["fallback_reason"]) == ("plain", "slow-tier")
    assert [(chunk["status"], chunk["reason"]) for chunk in told["chunks"]] == [("prefilled", "slow-tier")]
    assert side.is_forgotten(request)


@pytest.mark.parametrize(
    ("per_token", "step_tokens", "seconds"),
    [
        (0.001, 16, LEAST_SECONDS),
        (0.1, 16, 0.1 * len(FIRST)),
        (0.1, 512, LEAST_STEPS * 51.2),
        (0.01, 300, LEAST_STEPS * 3.0),
        (9.0, 16, MOST_SECONDS),
    ],
)
def test_it_waits_as_long_as_a_prefill_of_its_chunks_takes(clock, per_token, step_tokens, seconds):
    side = Side(shape={"step_tokens": step_tokens, "ranks": 2})
    side.store(FIRST, tier="disk")
    side.store(SECOND)
    side.report(costs={"blend": Line(0, per_token)}, rank=0)
    side.report(costs={"blend": Line(0, per_token / 2)}, rank=1)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    clock.now += min(seconds, MOST_SECONDS) - 0.1
    assert side.matched(request) is None
    clock.now += 0.1
    assert side.matched(request) == 0
    assert side.counts("fallbacks") == {"slow-tier": 1}


def test_each_fetch_has_its_own_time(clock):
    """Memory loses a chunk while its request waits for another."""
    side = Side()
    side.store(FIRST)
    side.store(SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    clock.now += UNMEASURED_SECONDS - 0.1
    side.store(FIRST, tier="disk")
    side.store(SECOND)
    side.report(fetched=["request"])
    assert side.matched(request) is None
    clock.now += UNMEASURED_SECONDS - 0.1
    assert side.matched(request) is None
    clock.now += 0.1
    assert side.matched(request) == 0
    assert side.counts("fallbacks") == {"slow-tier": 1}


def test_patience_ends_also_where_workers_never_report(clock):
    side = Side(is_known=False)
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    clock.now += UNMEASURED_SECONDS
    assert side.matched(request) == 0
    assert side.counts("fallbacks") == {"slow-tier": 1}
    assert not side.step().released


def test_a_chunk_that_is_begun_is_loaded_when_patience_ends(clock):
    """vLLM's prefix cache ends inside it, and layers with a sliding window may lack what comes before."""
    side = Side()
    side.store(FIRST, SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request, 48) is None
    clock.now += UNMEASURED_SECONDS
    assert side.matched(request, 48) == 52
    assert not side.counts("fallbacks")


def test_a_preempted_request_asks_again_and_waits_anew(clock):
    side = Side()
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    side.report(fetched=["request"])
    assert side.begin(request)[0] == 60
    side.step()
    request.num_preemptions = 1
    clock.now += 2 * UNMEASURED_SECONDS
    assert side.matched(request) is None
    assert fetches(side.step()) == [("request", of(FIRST))]
    clock.now += UNMEASURED_SECONDS - 1
    assert side.matched(request) is None
    side.report(fetched=["request"])
    assert side.begin(request)[0] == 60
    assert [load.request_id for load in side.step().loads] == ["request"]
    assert side.counts("requests") == {"reuse": 1}  # it is one request


def test_a_fetch_of_an_earlier_asking_is_not_taken_for_that_of_a_later_one():
    """The end of a fetch is reported by the request's name alone, so a request must not get blocks before its fetch
    has ended."""
    side = Side(shape={"ranks": 2})
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    side.report(rank=0, fetched=["request"])
    assert side.matched(request) is None
    side.report(rank=1, fetched=["request"])
    side.begin(request)
    assert side.matched(request) is None
    side.report(rank=0, fetched=["request"])
    assert side.matched(request) is None


def test_an_abort_while_it_waits_releases_what_was_fetched():
    side = Side()
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    side.step()
    side.scheduler.finished(request)
    assert side.is_forgotten(request)
    assert side.step().released == ["request"]
    side.report(fetched=["request"])  # which no request waits for any more
    assert side.step().is_empty


def test_a_request_that_fails_while_it_waits_is_plain_from_then_on(monkeypatch):
    side = Side()
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    with monkeypatch.context() as patch:
        patch.setattr(side.scheduler._waiting, "matched", None)
        assert side.matched(request) == 0
    work = side.step()
    assert (work.fetches, work.released) == ([], ["request"])
    side.store(FIRST)
    side.report(fetched=["request"])
    assert side.matched(request) == 0
    side.give(request, 0, more=100)
    assert not side.step().loads
    assert side.scheduler.finished(request) == {"mode": "plain", "fallback_reason": "error"}
    assert side.is_forgotten(request)


def test_a_request_that_fails_inside_a_chunk_is_loaded_all_the_same(monkeypatch):
    """Layers with a sliding window may lack KV that vLLM alone would need. It is not loaded in slices, which would
    need a plan."""
    side = Side()
    side.store(FIRST, SECOND)
    request = side.add(ask_about(FIRST, SECOND))
    side.ours(request).is_long = True
    monkeypatch.setattr(side.scheduler._waiting, "matched", None)
    assert side.ask(request, 32) == (68, False)
    side.give(request, 68, local=32)
    [load] = side.step().loads
    assert (load.start, load.is_sliced) == (32, False)


def test_an_abort_before_anything_was_asked_for_releases_nothing():
    side = Side()
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST))
    side.scheduler.finished(request)
    assert side.step().is_empty


def test_loading_releases_by_itself():
    side = Side()
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    side.report(fetched=["request"])
    side.begin(request)
    side.scheduler.finished(request)
    work = side.step()
    assert len(work.loads) == 1
    assert not work.released


def test_who_needs_nothing_after_all_releases_what_was_fetched():
    """While it waited, another request may have put all of its blocks into vLLM's prefix cache."""
    side = Side()
    side.store(FIRST, tier="disk")
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    side.report(fetched=["request"])
    assert side.matched(request, 64) == 0
    side.give(request, 0, local=64, more=6)
    work = side.step()
    assert work.released == ["request"]
    assert not work.loads


# --- tiers in which other engines store entries


def test_the_remote_tier_is_asked_for_what_nobody_knows():
    side = Side(**REMOTE)
    side.store(FIRST)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    assert fetches(side.step()) == [("request", of(SECOND))]
    side.store(SECOND)
    side.report(fetched=["request"], sources={digest_of(SECOND): "remote"})
    assert side.begin(request)[0] == 100
    report = side.scheduler.finished(request)
    assert [chunk["tier"] for chunk in report["chunks"]] == ["host", "remote"]


def test_an_engine_without_other_requests_asks_its_disk_for_what_nobody_knows():
    side = Side(**DISK)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    assert fetches(side.step()) == [("request", of(FIRST, SECOND))]
    side.store(SECOND)
    side.report(fetched=["request"], sources={digest_of(SECOND): "disk"})
    assert side.begin(request)[0] == 100
    report = side.scheduler.finished(request)
    assert [chunk["tier"] for chunk in report["chunks"] if chunk["status"] == "cached"] == ["disk"]


def test_a_busy_engine_asks_its_disk_once_it_has_company():
    """Before that, a request with new documents does not wait for a step of others."""
    side = Side(**DISK)
    side.run()
    assert side.matched(side.add(ask_about(FIRST, name="at once"))) == 0
    side.run()
    assert not side.run().fetches
    side.report(has_company=True)
    request = side.add(ask_about(SECOND))
    assert side.matched(request) is None
    assert fetches(side.run()) == [("request", of(SECOND))]


def test_without_a_slower_tier_nobody_is_asked():
    side = Side()
    side.store(FIRST)
    assert side.matched(side.add(ask_about(FIRST, SECOND))) == 100
    assert not side.step().fetches


def test_what_is_known_to_be_slow_and_what_is_unknown_are_fetched_together():
    side = Side(**REMOTE)
    side.store(SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    assert fetches(side.step()) == [("request", of(SECOND, FIRST))]
    side.store(SECOND)
    side.store(FIRST)
    side.report(fetched=["request"], sources={digest_of(FIRST): "remote", digest_of(SECOND): "disk"})
    side.begin(request)
    assert [chunk["tier"] for chunk in side.ours(request).report["chunks"]] == ["remote", "disk"]


def test_what_the_remote_tier_lacks_too_is_judged_then():
    side = Side(**REMOTE)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    assert not side.counts("fallbacks")
    side.step()
    side.report(fetched=["request"])
    assert side.matched(request) == 0  # nothing is there to reuse
    assert side.counts("fallbacks") == {"not-stored": 1}
    assert side.step().released == ["request"]


def test_what_another_engine_stored_is_judged_with_it():
    side = Side(**REMOTE)
    side.report(costs={"blend": Line(0, 1.0), "remap": Line(0, 0.001)})
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    side.step()
    side.store(FIRST, SECOND)
    side.report(fetched=["request"], costs={"blend": Line(0, 1.0), "remap": Line(0, 0.001)})
    assert side.matched(request) == 100


def test_requests_without_chunks_ask_nobody():
    side = Side(**REMOTE)
    assert side.matched(side.add(make_request("plain", text(5, 200)))) == 0
    assert side.step().is_empty
