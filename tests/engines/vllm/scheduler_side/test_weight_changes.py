"""The scheduler side when workers report that weights have changed, or that they cannot be identified."""

import pytest

from kvmosaic.engines.vllm.compat.scheduling import HIDDEN
from kvmosaic.engines.vllm.messages import RankReport, StepReport
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    SECOND,
    SEGMENT,
    Side,
    ask_about,
    digest_of,
    make_request,
    text,
)


def hashes(side):
    """Hashes of the blocks of a plain request."""
    return side.add(make_request("plain", text(5, 100))).block_hashes


def test_block_hashes_say_which_weights_there_are():
    side, other, third = Side(), Side(), Side()
    at_start = hashes(side)
    assert hashes(other) == at_start
    side.report(weights=1, weights_digest="a")
    other.report(weights=1, weights_digest="b")
    third.report(weights=1, weights_digest="a")
    assert hashes(side) == hashes(third)
    assert not {*hashes(side)} & {*hashes(other), *at_start}
    assert not any(each.endswith(HIDDEN) for each in hashes(side)), "routers may know blocks of exact KV"


def test_block_hashes_never_come_back():
    """Requests that run during a change leave KV of both weights in vLLM's prefix cache."""
    side = Side()
    seen = [*hashes(side)]
    for changes, digest in enumerate("abab", start=1):
        side.report(weights=changes, weights_digest=digest)
        seen += hashes(side)
    assert len(seen) == len(set(seen))


def test_a_change_is_told_once_and_by_the_rank_that_noticed_it_first():
    side = Side(shape={"ranks": 2})
    ours = side.ours(side.add(ask_about(FIRST)))
    side.report(weights=0, weights_digest="a")
    assert (ours.is_stale, side.step().weights) == (False, 0)
    reports = [
        RankReport(rank=rank, fastest="host", changes={}, fetched={}, costs={}, is_off=False, weights=rank)
        for rank in range(2)
    ]
    side.scheduler.update(StepReport(reports))
    assert (ours.is_stale, side.step().weights, side.step().weights) == (True, 1, 1)
    later = side.ours(side.add(ask_about(FIRST, name="later")))
    side.report(weights=1)
    assert not later.is_stale


@pytest.mark.parametrize("tiers", ["all", "memory", "none"])
def test_a_pool_is_asked_only_by_workers_that_use_it(tiers):
    side = Side(remote="valkey://localhost:1", miss_policy="fill-first", prefix_blocks=True)
    side.report(tiers=tiers)
    side.matched(side.add(ask_about(FIRST)))
    side.matched(side.add(make_request("plain", text(5, 100))))
    assert len(side.run().fetches) == (2 if tiers == "all" else 0)


def test_nothing_is_reused_nor_filled_until_weights_are_known_again():
    side = Side(prefix_blocks=True)
    side.store(FIRST)
    waiting = side.add(ask_about(FIRST, SECOND))
    assert side.matched(waiting, 16)
    side.matched(side.add(ask_about(text(5, 40), name="lacks it")))
    side.report(weights=1, weights_digest="a", tiers="none", is_all=True)
    assert side.matched(waiting, 16) == 0
    late = side.add(ask_about(FIRST, name="late"))
    assert side.counts("fallbacks")["unknown-weights"] == 2
    assert not any(work.fills or work.fill_slice for work in (side.run(), side.run()))
    assert side.scheduler.finished(late)["fallback_reason"] == "unknown-weights"

    side.report({digest_of(FIRST): "host"}, weights=2, weights_digest="b", tiers="all", is_all=True)
    assert side.matched(side.add(ask_about(FIRST, name="again")))


def test_a_request_that_begins_inside_a_chunk_is_loaded_all_the_same():
    """Layers with a sliding window may lack KV that the next tokens see."""
    side = Side()
    side.store(FIRST, SECOND)
    waiting = side.add(ask_about(FIRST, SECOND))
    side.report(weights=1, weights_digest="a", tiers="none", is_all=True)
    assert side.matched(waiting, 32) == 100 - 32


def test_a_long_chunk_that_was_begun_with_the_old_weights_is_filled_from_its_start():
    side = Side()
    side.matched(side.add(ask_about(text(5, 300))))
    assert [side.run().fill_slice.start for _ in range(2)] == [0, 32]
    side.report(weights=1, weights_digest="a")
    assert side.run().fill_slice.start == 0


@pytest.mark.parametrize("comes_before", [True, False])
def test_the_end_of_a_system_prompt_is_stored_of_requests_that_come_later(comes_before):
    """vLLM's prefix cache may hold KV of the old weights for an earlier request."""
    side = Side(miss_policy="fill-first")
    request = ask_about(FIRST)
    if comes_before:
        side.add(request)
    side.report(weights=1, weights_digest="a")
    if not comes_before:
        side.add(request)
    side.begin(request)
    [load] = side.step().loads
    assert load.is_findable is not comes_before


@pytest.mark.parametrize("tiers", ["all", "none"])
def test_no_prefix_is_saved_while_weights_are_unknown(tiers):
    side = Side(prefix_blocks=True)
    side.report(weights=1, weights_digest="a", tiers=tiers, is_all=True)
    request = side.add(make_request("plain", text(5, 3 * SEGMENT)))
    _, blocks = side.begin(request, more=4 * SEGMENT)
    side.step(scheduled={"plain": SEGMENT}, computed={"plain": 0}, new=frozenset({"plain"}), blocks={"plain": blocks})
    work = side.step(scheduled={"plain": SEGMENT}, computed={"plain": SEGMENT})
    assert bool(work.prefix_saves) is (tiers == "all")


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("have_changed", [True, False])
def test_prefixes_of_requests_from_before_a_change_are_not_saved(is_finished, have_changed):
    side = Side(prefix_blocks=True)
    request = side.add(make_request("plain", text(5, 3 * SEGMENT)))
    _, blocks = side.begin(request, more=4 * SEGMENT)
    side.step(scheduled={"plain": SEGMENT}, computed={"plain": 0}, new=frozenset({"plain"}), blocks={"plain": blocks})
    if is_finished:
        request.num_computed_tokens = SEGMENT
        side.scheduler.finished(request)
    if have_changed:
        side.report(weights=1, weights_digest="a")
    goes_on = {} if is_finished else {"scheduled": {"plain": SEGMENT}, "computed": {"plain": SEGMENT}}
    assert bool(side.step(**goes_on).prefix_saves) is not have_changed
