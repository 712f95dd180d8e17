"""Whether reuse is faster than a plain prefill, and which chunks are noted to be filled in the background."""

import random

import pytest

from kvmosaic.core.config import load_config
from kvmosaic.engines.vllm.messages import Adapter, Line, RankReport
from kvmosaic.engines.vllm.scheduler_side.admission import LOAD_SHARE, TRIAL_SHARE, Admission, Judge
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    QUESTION,
    SECOND,
    SINK,
    STEP,
    SYSTEM,
    Side,
    ask_about,
    digest_of,
    make_request,
    make_shape,
    text,
)

CHEAP_MOVES = {"blend": Line(0, 1.0), "remap": Line(0, 0.001)}
DEAR_MOVES = {"blend": Line(0, 1.0), "remap": Line(0, 3.0)}


# --- the judge


@pytest.mark.parametrize("slower", [1.5, 10.0, 100.0])
def test_what_is_too_slow_is_tried_again_for_little(slower):
    judge, tries, count = Judge(), 0, 10_000
    lost = spent = 0.0
    for _ in range(count):
        otherwise = random.uniform(0.1, 1)
        is_tried = judge.is_faster(slower * otherwise, otherwise)
        tries += is_tried
        lost += (slower - 1) * otherwise if is_tried else 0
        spent += otherwise
    assert tries > 0
    assert lost <= TRIAL_SHARE * spent


def test_what_is_faster_is_always_done():
    judge = Judge()
    for _ in range(100):
        assert judge.is_faster(0.9, 1.0)
        judge.is_faster(random.uniform(1, 20), 1.0)


# --- tokens to compute


def admission(*stored, step_tokens=64, **settings):
    mirror = StoreMirror(1)
    changes = {digest_of(chunk): "host" for chunk in stored}
    mirror.update(RankReport(rank=0, fastest="host", changes=changes, fetched={}, costs={}, is_off=False))
    config = load_config(**{"miss_policy": "background", **settings})
    rules = Admission(config, make_shape(step_tokens=step_tokens), mirror)
    rules.measured(0, {})  # each rank says so in its first report
    return rules


def chunk_request(**params):
    side = Side()
    return side.ours(side.add(ask_about(FIRST, SECOND, **params)))


@pytest.mark.parametrize(
    ("local", "ratio", "stored", "expected"),
    [
        (0, 0.0, (FIRST, SECOND), 20),  # the system prompt
        (16, 0.0, (FIRST, SECOND), 4),
        (32, 0.0, (FIRST, SECOND), 0),
        (0, 0.25, (FIRST, SECOND), 20 + 20),
        (0, 1.0, (FIRST, SECOND), 100),
        (0, 0.0, (FIRST,), 20 + 40),
        (0, 0.5, (FIRST,), 20 + 40 + 20),
        (80, 0.5, (FIRST, SECOND), 10),  # half of a chunk is ahead
        (80, 0.0, (FIRST,), 20),
        (0, 0.0, (), 100),
    ],
)
def test_what_is_computed_to_bring_the_rest(local, ratio, stored, expected):
    request = chunk_request(recompute_ratio=ratio)
    assert admission(*stored).tokens_to_compute(request, local) == expected


@pytest.mark.parametrize(
    ("ratio", "stored", "expected"),
    [
        (0.0, (FIRST, SECOND), 20),
        (0.0, (FIRST,), 20 + len(SINK) + 40),
        (0.5, (FIRST,), 20 + len(SINK) + 40 + 40),  # filled chunks are also blended
        (0.5, (FIRST, SECOND), 20 + 40),
    ],
)
def test_what_is_computed_where_missing_chunks_are_filled_first(ratio, stored, expected):
    request, rules = chunk_request(recompute_ratio=ratio), admission(*stored, miss_policy="fill-first")
    request.is_alone = True
    assert rules.tokens_to_compute(request, 0) == expected
    assert rules.fills(request, 0)


def test_beside_others_more_than_a_step_has_room_for_is_computed_as_text():
    request, rules = chunk_request(recompute_ratio=0.5), admission(FIRST, miss_policy="fill-first", step_tokens=80)
    assert not rules.fills(request, 0)
    assert rules.tokens_to_compute(request, 0) == 20 + 40 + 20
    request.adapter = Adapter(1, b"digest")  # it may not be active in later steps
    assert rules.fills(request, 0)


# --- predictions


def test_before_costs_are_measured_fewer_tokens_are_faster():
    request = chunk_request()
    assert admission(FIRST).is_faster(request, 0)
    assert not admission().is_faster(request, 0)
    assert request.predicted is None


@pytest.mark.parametrize("known", [{}, {"blend": Line(0, 1)}, {"remap": Line(0, 1)}])
def test_half_measured_costs_predict_nothing(known):
    request, rules = chunk_request(), admission(FIRST)
    rules.measured(0, known)
    assert rules.is_faster(request, 0)
    assert request.predicted is None


def test_the_prediction_is_of_the_slowest_rank():
    request, rules = chunk_request(recompute_ratio=0.25, policy="random"), admission(FIRST, SECOND)
    rules.measured(0, {"blend": Line(1, 0.1), "remap": Line(0, 0.01)})
    rules.measured(1, {"blend": Line(0, 0.1), "remap": Line(2, 0.01)})
    assert not rules.is_faster(request, 100 - 1)  # one token of a chunk: 2 s, or 1.1 s
    assert rules.is_faster(request, 0)
    assert request.predicted == pytest.approx((1 + 40 * 0.1) + (2 + 60 * 0.01))


def test_looking_at_the_prompt_is_predicted_where_it_was_measured():
    request, rules = chunk_request(recompute_ratio=0.25), admission(FIRST, SECOND)
    costs = {"blend": Line(0, 1.0), "remap": Line(0, 0.0)}
    rules.measured(0, costs)
    assert rules.is_faster(request, 0)
    assert request.predicted == pytest.approx(40)
    rules.measured(0, {**costs, "probe": Line(5, 0.1)})
    assert rules.is_faster(request, 0)
    assert request.predicted == pytest.approx(40 + 5 + 10)
    other = chunk_request(recompute_ratio=0.25, policy="random")
    assert rules.is_faster(other, 0)
    assert other.predicted == pytest.approx(40)


def test_where_all_has_to_be_computed_no_trial_is_made():
    request, rules = chunk_request(recompute_ratio=1.0), admission(FIRST, SECOND)
    rules.measured(0, {"blend": Line(0, 1.0), "remap": Line(0, 0.0)})
    assert not any(rules.is_faster(request, 0) for _ in range(100))


# --- outcomes


def test_what_is_predicted_to_be_slower_is_prefilled():
    side = Side()
    side.store(FIRST, SECOND)
    side.report(costs=DEAR_MOVES)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.ask(request) == (0, False)
    assert side.counts("fallbacks") == {"slower": 1}
    assert side.counts("requests") == {"plain": 1}
    side.give(request, 0, more=110)
    assert side.step().is_empty
    told = side.scheduler.finished(request)
    assert (told["mode"], told["fallback_reason"]) == ("plain", "slower")
    assert [(chunk["status"], chunk["reason"]) for chunk in told["chunks"]] == [("prefilled", "slower")] * 2
    assert side.is_forgotten(request)


def test_what_was_too_slow_is_tried_again_some_time():
    side = Side()
    side.store(FIRST, SECOND)
    side.report(costs={"blend": Line(0, 1.0), "remap": Line(0, 1.5)})
    verdicts = []
    for number in range(20):
        request = side.add(ask_about(FIRST, SECOND, name=str(number)))
        verdicts.append(side.matched(request))
        side.scheduler.finished(request)
        side.step()
    assert verdicts[0] == 0
    assert 0 < verdicts.count(100) <= 2


def test_the_verdict_is_made_once_per_asking():
    """vLLM asks again while a request waits for blocks, and each refusal would save up time for a trial."""
    side = Side()
    side.store(FIRST, SECOND)
    side.report(costs=CHEAP_MOVES)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) == 100
    side.report(costs=DEAR_MOVES)
    assert side.matched(request) == 100
    side.give(request, 100)
    assert side.matched(request) == 0  # after a preemption it is judged again
    assert side.counts("fallbacks") == {"slower": 1}


def test_a_chunk_that_is_begun_is_loaded_at_any_cost():
    side = Side()
    side.store(FIRST, SECOND)
    side.report(costs=DEAR_MOVES)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request, 48) == 52


def test_chunks_that_are_filled_first_are_not_judged():
    side = Side(miss_policy="fill-first", shape={"step_tokens": 2 * STEP})
    side.report(costs=DEAR_MOVES)
    assert side.matched(side.add(ask_about(FIRST, SECOND))) == 100
    assert not side.scheduler._backlog


def test_what_was_predicted_is_observed():
    side = Side()
    side.store(FIRST, SECOND)
    side.report(costs=CHEAP_MOVES)
    side.begin(side.add(ask_about(FIRST, SECOND)))
    [seconds] = side.scheduler.stats.data["seconds"]["predicted"]
    assert seconds == pytest.approx(20 + 80 * 0.001)


# --- what is missing


def filled(side):
    """Contexts and chunks that the next decode steps fill."""
    done, begun = [], ()
    for _ in range(10):
        work = side.run()
        done += [(fill.context, tokens) for fill in work.fills for _, tokens in fill.chunks]
        if part := work.fill_slice:
            begun = (*begun, *part.tokens) if part.start else part.tokens
            if part.is_last:
                done.append((begun[: part.context_tokens], begun[part.context_tokens :]))
    return done


@pytest.mark.parametrize("stored", [(), (FIRST,)], ids=["prefilled", "partly-reused"])
def test_missing_chunks_are_filled_in_the_background(stored):
    side = Side()
    side.store(*stored)
    side.matched(side.add(ask_about(FIRST, SECOND)))
    missing = [chunk for chunk in (FIRST, SECOND) if chunk not in stored]
    assert filled(side) == [(SINK, tuple(chunk)) for chunk in missing]
    assert filled(side) == []
    assert side.pool.get_num_free_blocks() == 200


@pytest.mark.parametrize("policy", ["never", "fill-first"])
def test_other_miss_policies_fill_nothing_in_the_background(policy):
    side = Side(miss_policy=policy, shape={"step_tokens": 2 * STEP})
    side.matched(side.add(ask_about(FIRST, SECOND)))
    assert filled(side) == []


def test_chunks_that_never_fit_are_not_filled():
    long = text(5, 126)
    side = Side(shape={"max_positions": len(SINK) + 125})
    side.matched(side.add(ask_about(FIRST, long)))
    assert filled(side) == [(SINK, tuple(FIRST))]
    side = Side(shape={"max_positions": len(SINK) + 126})
    side.matched(side.add(ask_about(long)))
    assert filled(side) == [(SINK, tuple(long))]


def test_missing_chunks_of_a_begun_request_are_filled_too():
    side = Side()
    assert side.matched(side.add(ask_about(FIRST, SECOND)), 48) == 52
    assert filled(side) == [(SINK, tuple(FIRST)), (SINK, tuple(SECOND))]


def test_emptying_the_store_empties_the_backlog_and_what_is_known():
    side = Side()
    side.store(FIRST)
    request = side.add(ask_about(FIRST, SECOND))
    assert side.matched(request) == 100
    side.scheduler.empty_memory()
    work = side.run()
    assert work.empties_memory
    assert not work.fills
    assert not side.step().empties_memory
    assert not side.scheduler._mirror.has(digest_of(FIRST))
    other = side.add(ask_about(FIRST, name="other"))
    assert side.matched(other) is None  # slower tiers may have it
    side.report(is_all=True)
    assert side.matched(other) == 0


def test_the_lengths_these_tests_count_with():
    assert (len(SYSTEM), len(FIRST), len(SECOND), len(QUESTION)) == (20, 40, 40, 10)


# --- choices that take long


@pytest.mark.parametrize(
    ("policy", "gap", "changes"),
    [
        ("composite", 32, ""),
        ("composite", 33, "is made without a probe"),
        ("sink-link", 80, ""),
        ("query-attention", 33, "is not made"),
        ("kv-deviation(layers=0)", 10, ""),
        ("kv-deviation(layers=2)", 10, "is not made"),
        ("kv-deviation(layers=0+1)", 4, "is not made"),
    ],
)
def test_beside_others_no_choice_takes_more_of_a_step_than_loads_may(policy, gap, changes):
    """Before the choice, text before the question is computed in one go, and chunks through some layers. A set that
    shrinks from layer to layer is chosen while it is computed."""
    chunks = [text(1, 40), text(2, 40)]
    for is_alone in (True, False):
        side = Side(shape={"step_tokens": round(32 / LOAD_SHARE)})
        side.store(*chunks)
        tokens = [*chunks[0], *text(3, gap), *chunks[1], *QUESTION]
        edges = [(0, 0), (0, 40), (40 + gap, 80 + gap), (80 + gap, len(tokens))]
        if not is_alone:
            side.run()
        request = side.add(make_request("a", tokens, boundaries=edges, recompute_ratio=0.9, policy=policy))
        # A judge that always finds reuse faster.
        side.scheduler._admission.is_faster = lambda *_: True
        if changes == "is not made" and not is_alone:
            assert side.matched(request) == 0
            assert side.counts("fallbacks") == {"slower": 1}
            continue
        assert side.begin(request)[0] == 80 + gap
        [load] = side.step().loads
        assert load.may_probe is (is_alone or not changes)
        assert side.counts("fallbacks") == {}


@pytest.mark.parametrize(("gap", "reasons"), [(4, {}), (5, {"slower": 1})])
def test_a_set_that_shrinks_is_computed_in_one_step(gap, reasons):
    """Text before the question is computed twice."""
    side, chunks = Side(shape={"step_tokens": 80}), [text(1, 40), text(2, 40)]
    side.store(*chunks)
    tokens = [*chunks[0], *text(3, gap), *chunks[1], *QUESTION]
    edges = [(0, 0), (0, 40), (40 + gap, 80 + gap), (80 + gap, len(tokens))]
    policy = "kv-deviation(layers=0+1)"
    request = side.add(make_request("a", tokens, boundaries=edges, recompute_ratio=0.9, policy=policy))
    side.scheduler._admission.is_faster = lambda *_: True
    assert side.matched(request) == (0 if reasons else 80 + gap)
    assert side.counts("fallbacks") == reasons


@pytest.mark.parametrize(("gap", "may_probe"), [(80, True), (81, False)])
def test_alone_a_choice_takes_no_more_than_a_step(gap, may_probe):
    side = Side(shape={"step_tokens": 80})
    side.store(FIRST)
    tokens = [*text(3, gap), *FIRST, *QUESTION]
    edges = [(0, 0), (gap, gap + 40), (gap + 40, len(tokens))]
    request = side.add(make_request("a", tokens, boundaries=edges, recompute_ratio=0.9, policy="composite"))
    side.scheduler._admission.is_faster = lambda *_: True
    assert side.begin(request)[0] == gap + 40
    [load] = side.step().loads
    assert load.may_probe is may_probe


def test_a_choice_that_waited_for_others_may_probe_when_they_are_gone():
    side = Side(shape={"step_tokens": 80})
    side.store(FIRST, SECOND)
    side.scheduler._admission.is_faster = lambda *_: True
    side.run("other")
    side.begin(side.add(ask_about(SECOND, name="first", recompute_ratio=0.3, policy="random")))  # leaves no room
    tokens = [*text(3, 40), *FIRST, *QUESTION]
    edges = [(0, 0), (40, 80), (80, len(tokens))]
    request = side.add(make_request("a", tokens, boundaries=edges, recompute_ratio=0.9, policy="composite"))
    assert side.matched(request) is None
    assert not side.ours(request).may_probe
    side.step()
    side.step()
    assert side.begin(request)[0] == 80
    assert side.ours(request).may_probe
