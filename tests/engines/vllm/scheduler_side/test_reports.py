"""Reports to requests, and vLLM's own counters."""

import logging

import pytest

from kvmosaic.core.admin_key import ADMIN_KEY_VARIABLE, AdminKey
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.engines.vllm.messages import Line, Recomputed
from kvmosaic.engines.vllm.parameters import PAGE_PARAMETER
from kvmosaic.engines.vllm.scheduler_side.planner import MAX_NAMED
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    QUESTION,
    SECOND,
    SYSTEM,
    Side,
    ask_about,
    digest_of,
    make_request,
    text,
)


def finish(side, request, local=0, more=10):
    """Load a request. Returns its report."""
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
        "recompute_ratio": 0.0,
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


# --- requests that are served plainly


def test_new_documents_are_reported_and_counted_as_missing():
    side = Side()
    request = side.add(ask_about(FIRST, SECOND, FIRST))
    side.begin(request, more=150)
    assert side.step().missed == [(digest_of(FIRST), 40), (digest_of(SECOND), 40)]  # each once
    assert not side.step().missed
    report = side.scheduler.finished(request)
    assert (report["mode"], report["fallback_reason"]) == ("plain", "not-stored")
    assert statuses(report) == [("prefilled", None, "missing")] * 3
    assert [chunk["span"]["start"] for chunk in report["chunks"]] == [20, 60, 100]
    assert side.is_forgotten(request)


def test_what_is_stored_and_not_reused_is_neither_missing_nor_a_miss():
    """The stored part is too small to be worth reusing: most of the prompt is new."""
    side = Side()
    side.store(FIRST)
    side.report(costs={"blend": Line(0, 1.0), "remap": Line(0, 3.0)})
    request = side.add(ask_about(FIRST, SECOND))
    side.begin(request, more=110)
    assert side.step().missed == [(digest_of(SECOND), 40)]
    report = side.scheduler.finished(request)
    assert report["fallback_reason"] == "slower"
    assert statuses(report) == [("prefilled", None, "slower"), ("prefilled", None, "missing")]


def test_what_the_prefix_cache_has_of_a_request_that_is_served_plainly_is_cached():
    side = Side()
    first = text(1, 44)  # ends with a block
    request = side.add(ask_about(first, SECOND))
    side.begin(request, local=64, more=60)
    assert side.step().missed == [(digest_of(SECOND), 40)]
    report = side.scheduler.finished(request)
    assert statuses(report) == [("cached", "prefix-cache", None), ("prefilled", None, "missing")]


@pytest.mark.parametrize(
    ("stored", "ratio", "reason"),
    [((), 0.0, "not-stored"), ((FIRST,), 0.9, "slower"), ((FIRST, SECOND), 1.0, "slower"), ((), 1.0, "slower")],
)
def test_chunks_are_the_reason_only_where_storing_them_would_help(stored, ratio, reason):
    """At ratio 1 everything is computed, whatever is stored."""
    side = Side()
    side.store(*stored)
    side.report(costs={"blend": Line(0, 1.0), "remap": Line(0, 30.0)})
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=ratio))
    assert side.matched(request) == 0
    assert side.counts("fallbacks") == {reason: 1}


# --- names that are not found


@pytest.fixture
def side(tokenizer, monkeypatch):
    """A side that can find named documents in prompts."""
    side = Side()
    monkeypatch.setattr(side.scheduler._planner, "_parser", ChunkTokenParser(tokenizer, None, 8))
    return side


HERE = "The harbour of Kelmoor was built by hand in the long winter of 1840."
GONE = "Nobody ever wrote a single word about the lighthouse at Tarn Point."


@pytest.fixture
def named(tokenizer):
    """A request that names documents."""

    def make(prompt, *documents):
        return make_request("named", tokenizer.encode(prompt), documents=list(documents), report=True)

    return make


def test_names_that_are_not_found_are_told(side, named):
    report = finish(side, side.add(named(f"Read this. {HERE} What was built?", GONE, HERE, GONE)), more=200)
    assert report["documents_not_found"] == [0, 2]
    assert report["fallback_reason"] == "not-stored"
    assert len(report["chunks"]) == 1


def test_a_request_whose_names_are_all_absent_is_plain_and_says_so(side, named):
    request = side.add(named("What was built?", GONE, HERE))
    assert side.ask(request) == (0, False)
    assert side.scheduler.finished(request) == {
        "mode": "plain",
        "fallback_reason": None,
        "documents_not_found": [0, 1],
    }
    assert side.counts("fallbacks") == {}
    assert side.is_forgotten(request)


def test_what_is_reused_is_told_along_with_what_was_not_found(side, named):
    prompt = f"Read this. {HERE} What was built?"
    first = side.add(named(prompt, HERE))
    side.begin(first, more=200)
    side.report({digest: "host" for digest, _ in side.step().missed})
    side.scheduler.finished(first)
    report = finish(side, side.add(named(prompt, HERE, GONE)))
    assert (report["mode"], report["documents_not_found"]) == ("reuse", [1])
    assert "fallback_reason" not in report


# --- unknown parameters


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvmosaic")]


def test_unknown_parameters_are_named_once_in_the_log_and_in_every_report(caplog):
    side = Side()
    side.store(FIRST, SECOND)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            request = side.add(ask_about(FIRST, SECOND, name=str(number), docs=["text"], recompute_ration=0.5))
            assert finish(side, request)["unknown_parameters"] == ["docs", "recompute_ration"]
    [line] = lines(caplog)
    assert "docs, recompute_ration" in line
    assert "documents" in line  # what there is


@pytest.mark.parametrize(
    "others",
    [
        {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "elsewhere", "remote_block_ids": [1]},
        {"transfer_id": "t", "tp_size": 2, "lmcache.skip_save": True},
    ],
)
def test_parameters_of_other_connectors_are_nobodys_business(others, caplog):
    side = Side()
    with caplog.at_level(logging.WARNING):
        request = side.add(make_request("other", SYSTEM + QUESTION, report=True, **others))
    assert side.scheduler.finished(request) == {"mode": "plain", "fallback_reason": None}
    assert lines(caplog) == []


def test_what_is_told_of_unknown_parameters_is_bounded(caplog):
    side = Side()
    with caplog.at_level(logging.WARNING):
        for number in range(2 * MAX_NAMED):
            sent = {f"{number}-{index}" + "x" * 1000: 1 for index in range(1000)}
            request = side.add(make_request(str(number), SYSTEM, report=True, **sent))
            told = side.scheduler.finished(request)["unknown_parameters"]
            assert len(told) == 4
            assert max(map(len, told)) < 100
    assert len(lines(caplog)) <= MAX_NAMED
    assert max(map(len, lines(caplog))) < 600


def test_a_report_says_which_tokens_were_recomputed():
    side = Side()
    side.store(FIRST, SECOND)
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0.25))
    side.begin(request)
    [load] = side.step().loads
    assert load.is_reported
    spans = [[20, 25], [60, 65]]
    side.report(recomputed={request.request_id: Recomputed(spans, False), "x": Recomputed([[1, 2]], True)})
    report = side.scheduler.finished(request)
    assert (report["recompute_ratio"], report["recomputed"]) == (0.25, spans)
    assert (report["policy"], report["probed"]) == ("composite", False)


def test_a_report_does_not_say_how_a_policy_chose_that_was_not_asked():
    """No policy is asked if none of the chunks could be brought."""
    side = Side()
    side.store(FIRST)
    request = side.add(ask_about(FIRST, recompute_ratio=0.25))
    side.begin(request)
    side.step()
    side.report(recomputed={request.request_id: Recomputed([], None)})
    report = side.scheduler.finished(request)
    assert report["recomputed"] == []
    assert "probed" not in report


def test_tokens_of_requests_without_a_report_are_not_reported():
    side = Side(client_parameters="documents,boundaries")
    side.store(FIRST)
    side.begin(side.add(ask_about(FIRST)))
    [load] = side.step().loads
    assert not load.is_reported


@pytest.mark.parametrize(("sent", "is_told"), [("right", True), ("wrong", False), (None, False), (["right"], False)])
def test_the_page_gets_reports_that_clients_may_not_have(sent, is_told, monkeypatch):
    """The server asks for them with a text that clients do not know, and hides them from clients."""
    secret = "a secret of the operator"
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, secret)
    side = Side(client_parameters="documents,boundaries", chunk_page=True)
    side.store(FIRST)
    page = AdminKey(secret.encode()).page_pass if sent == "right" else sent
    told = finish(side, side.add(ask_about(FIRST, report=True, **{PAGE_PARAMETER: page})))
    assert (told is not None and told["mode"] == "reuse") is is_told


def test_without_a_page_nobody_gets_a_report_for_it(monkeypatch):
    secret = "a secret of the operator"
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, secret)
    side = Side(client_parameters="documents,boundaries")
    side.store(FIRST)
    page = AdminKey(secret.encode()).page_pass
    assert finish(side, side.add(ask_about(FIRST, **{PAGE_PARAMETER: page}))) is None
