"""What requests and vLLM's own counters are told."""

import pytest

from tests.engines.vllm.scheduler_side.fakes import FIRST, SECOND, Side, ask_about, text


def finish(side, request, local=0, more=10):
    """Loads a request, and its report."""
    side.begin(request, local, more)
    side.step()
    return side.scheduler.finished(request)


def statuses(report):
    return [(chunk["status"], chunk["tier"], chunk["reason"]) for chunk in report["chunks"]]


def test_everything_is_reused():
    side = Side()
    side.store(FIRST, SECOND)
    report = finish(side, side.add(ask_about(FIRST, SECOND)))
    assert report == {
        "mode": "reuse",
        "prefix_tokens": 0,
        "reused_tokens": 80,
        "chunks": [
            {"span": {"start": 20, "end": 60}, "status": "cached", "tier": "host", "reason": None},
            {"span": {"start": 60, "end": 100}, "status": "cached", "tier": "host", "reason": None},
        ],
    }
    assert side.counts("requests") == {"reuse": 1}


@pytest.mark.parametrize(
    ("policy", "mode", "status"), [("background", "reuse", "prefilled"), ("fill-first", "fill", "filled")]
)
def test_what_is_missing_is_prefilled_or_filled(policy, mode, status):
    side = Side(miss_policy=policy)
    side.store(FIRST)
    report = finish(side, side.add(ask_about(FIRST, SECOND)))
    assert (report["mode"], report["reused_tokens"]) == (mode, 40)
    assert statuses(report) == [("cached", "host", None), (status, None, "missing")]
    assert side.counts("requests") == {mode: 1}


def test_chunks_in_the_prefix_cache_are_of_that_cache_and_counted_by_it():
    side = Side()
    side.store(FIRST, SECOND)
    report = finish(side, side.add(ask_about(FIRST, SECOND)), local=64)
    assert statuses(report) == [("cached", "prefix-cache", None), ("cached", "host", None)]
    assert report["prefix_tokens"] == 64
    assert report["reused_tokens"] == 36  # four of the second chunk are in the prefix cache


def test_all_of_it_in_the_prefix_cache():
    side = Side()
    side.store(FIRST, text(2, 36))
    request = side.add(ask_about(FIRST, text(2, 36)))
    assert side.matched(request, 96) == 0
    side.give(request, 0, local=96, more=10)
    assert not side.step().loads
    report = side.scheduler.finished(request)
    assert (report["mode"], report["prefix_tokens"], report["reused_tokens"]) == ("reuse", 96, 0)
    assert {chunk["tier"] for chunk in report["chunks"]} == {"prefix-cache"}


@pytest.mark.parametrize(("ratio", "reused"), [(0.25, 60), (0.3, 56), (1.0, 0)])
def test_what_is_recomputed_is_not_reused(ratio, reused):
    side = Side(miss_policy="fill-first")
    side.store(FIRST, SECOND)
    assert finish(side, side.add(ask_about(FIRST, SECOND, recompute_ratio=ratio)))["reused_tokens"] == reused


def test_chunks_are_reported_with_the_tier_they_came_from():
    side = Side()
    side.store(FIRST)
    side.store(SECOND, tier="disk")
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) is None
    side.store(SECOND)  # where it is now
    side.report(fetched=["request"])
    assert statuses(finish(side, request)) == [("cached", "host", None), ("cached", "disk", None)]


def test_the_slowest_of_several_ranks_names_the_tier():
    side = Side(shape={"ranks": 2}, miss_policy="fill-first")
    side.store(FIRST)
    side.store(FIRST, tier="disk", rank=1)
    request = side.add(ask_about(FIRST))
    assert side.matched(request) is None
    side.report(fetched=["request"])
    assert statuses(finish(side, request)) == [("cached", "disk", None)]


def test_vllm_counts_what_was_reused_and_not_what_was_brought():
    side = Side()
    side.store(SECOND)
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0.5, policy="random"))
    side.begin(request, local=32)
    stats = request.prefill_stats
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (32, 20)
    assert stats.num_cached_tokens == 52


def test_after_a_preemption_vllms_first_count_stays():
    side = Side()
    side.store(FIRST)
    request = side.add(ask_about(FIRST))
    side.begin(request)
    request.num_preemptions = 1
    side.step()
    side.begin(request, local=32)
    assert request.prefill_stats.num_local_cached_tokens == 0
    assert side.counts("requests") == {"reuse": 1}


def test_a_request_that_is_aborted_before_it_got_blocks_reports_nothing_of_its_chunks():
    side = Side()
    side.store(FIRST)
    request = side.add(ask_about(FIRST))
    assert side.scheduler.finished(request) == {"mode": "plain", "fallback_reason": None}
