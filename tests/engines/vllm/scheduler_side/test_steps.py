"""The work for chunks that fits into a step, beside other requests and in slices."""

import time

import pytest

from kvmosaic.engines.vllm.messages import Line
from kvmosaic.engines.vllm.scheduler_side.admission import LOAD_SHARE, SLICED_STEP_SHARE
from kvmosaic.engines.vllm.scheduler_side.waiting import PATIENCE_SECONDS
from tests.engines.vllm.scheduler_side.fakes import FIRST, QUESTION, SECOND, STEP, Side, ask_about, make_request, text

HALF = {"recompute_ratio": 0.5, "policy": "random"}
"""60 of the 100 tokens before the question are computed: 20 of the system prompt, 40 of chunks."""
WIDE = round(STEP / LOAD_SHARE)
"""Size of a step in which loads may take the time of 64 tokens."""
PLANNED = int(SLICED_STEP_SHARE * WIDE)
"""Number of tokens whose time such a step may take if it has slices."""
ALL = {"recompute_ratio": 1.0}
"""All 100 tokens are computed, which is more than a step has."""


def stored(**settings):
    side = Side(**settings)
    side.store(FIRST, SECOND)
    return side


def admitted(side, name, **params):
    """A request that is being loaded, if the step has room for it."""
    request = side.add(ask_about(FIRST, SECOND, name=name, **params))
    matched = side.matched(request)
    if matched:
        side.give(request, matched)
    return matched


def test_a_step_has_room_for_a_share_of_the_tokens_that_vllm_computes_in_one():
    side = stored(shape={"step_tokens": WIDE})
    assert [admitted(side, name) for name in "abcd"] == [100, 100, 100, None]  # 20 tokens each, of 64
    side.step()
    assert admitted(side, "e") == 100


@pytest.mark.parametrize(
    ("params", "costs", "count"),
    [
        ({}, {"remap": Line(0, 0.25)}, 1),  # 80 tokens are placed in the time of 20
        ({}, {"remap": Line(5, 0)}, 2),
        ({}, {"blend": Line(0, 1)}, 3),
        ({}, {"blend": Line(40, 0.75)}, 1),  # of the 160 s of a full step, a pass takes 40 in any case
        ({}, {"probe": Line(20, 0)}, 3),  # nothing is chosen
        ({"recompute_ratio": 0.1, "policy": "composite"}, {"probe": Line(5, 0)}, 1),
        ({"recompute_ratio": 0.1, "policy": "random"}, {"probe": Line(5, 0)}, 2),
    ],
)
def test_placing_and_choosing_take_room_as_they_were_measured(params, costs, count):
    side = stored(shape={"step_tokens": WIDE})
    side.report(costs={"blend": Line(0, 1), "remap": Line(0, 0), **costs})
    assert [admitted(side, name, **params) for name in "abcd"] == [100] * count + [None] * (4 - count)


def test_a_request_that_the_step_has_no_room_for_comes_with_the_next():
    side = stored()
    first, second = (side.add(ask_about(FIRST, SECOND, name=name, **HALF)) for name in "ab")
    side.begin(first)
    assert side.matched(second) is None
    assert [load.request_id for load in side.step().loads] == ["a"]
    assert side.begin(second)[0] == 100
    assert [load.request_id for load in side.step().loads] == ["b"]
    assert not side.counts("fallbacks")


@pytest.mark.parametrize(("local", "matched", "fallbacks"), [(0, 0, {"slower": 1}), (32, None, {})])
def test_who_never_gets_room_is_prefilled_unless_it_begins_inside_a_chunk(local, matched, fallbacks, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    side = stored()
    first, second = (side.add(ask_about(FIRST, SECOND, name=name, **HALF)) for name in "ab")
    side.begin(first)
    assert side.matched(second, local) is None
    now += PATIENCE_SECONDS - 0.1
    assert side.matched(second, local) is None
    now += 0.1
    assert side.matched(second, local) == matched
    assert side.counts("fallbacks") == fallbacks


def test_the_first_request_of_a_step_is_admitted_whatever_its_size():
    side = stored(miss_policy="fill-first")
    assert admitted(side, "a", **ALL) == 100
    assert admitted(side, "b", **ALL) is None


def test_room_is_taken_by_those_that_got_blocks_not_by_those_that_asked():
    side = stored(shape={"step_tokens": WIDE})
    for name in "abcde":
        assert side.matched(side.add(ask_about(FIRST, SECOND, name=name, **HALF))) == 100


def test_what_the_prefix_cache_has_takes_no_room():
    side = stored()
    for name in "abcde":
        request = side.add(ask_about(FIRST, SECOND, name=name))
        assert side.begin(request, local=32)[0] == 68


# --- slices


def running(**settings):
    """The scheduler's side of an engine in which another request decodes."""
    side = stored(**settings)
    side.run()
    return side


@pytest.mark.parametrize(
    ("params", "slice_tokens"),
    [
        ({"recompute_ratio": 0.0}, 0),
        (HALF, 0),
        (ALL, PLANNED - 1),  # and a token of the other's
        ({"recompute_ratio": 0.6, "policy": "composite"}, PLANNED - 21),  # which has the system prompt computed first
        ({"recompute_ratio": 0.1, "policy": "composite"}, 0),
    ],
)
def test_what_takes_longer_than_that_share_of_a_step_is_loaded_in_slices_while_others_run(params, slice_tokens):
    side = running(miss_policy="fill-first", shape={"step_tokens": WIDE})
    request = side.add(ask_about(FIRST, SECOND, **params))
    assert side.ask(request) == (100, slice_tokens > 0)
    side.give(request, 100)
    work = side.run()
    assert (work.loads[0].is_sliced, work.slice_tokens) == (slice_tokens > 0, slice_tokens)
    assert work.loads[0].fill is not work.loads[0].is_sliced  # lost chunks are not filled in one go


@pytest.mark.parametrize(("seconds", "is_long"), [(0.0, False), (9.0, True)])
def test_a_choice_takes_a_pass_of_its_own(seconds, is_long):
    """A load may take 80 tokens. It computes 64: the system prompt twice, and 24 tokens of chunks. A pass that takes
    as long as 9 tokens leaves 71, and the choice needs another pass."""
    side = running(shape={"step_tokens": WIDE})
    side.report(costs={"blend": Line(seconds, 1 - seconds / (WIDE))})
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0.3, policy="composite"))
    assert side.ask(request) == (100, is_long)


def test_nothing_is_computed_again_for_requests_that_have_to_wait(monkeypatch):
    """vLLM asks about all of them in every step."""
    side = running(shape={"step_tokens": WIDE})
    choosing = {"recompute_ratio": 0.1, "policy": "composite"}
    waiting = [side.add(ask_about(FIRST, SECOND, name=name, **choosing)) for name in "bcdef"]
    side.begin(side.add(ask_about(FIRST, SECOND, name="a", **HALF)))
    assert [side.matched(request) for request in waiting] == [None] * 5
    admission = side.scheduler._admission
    shares, asked = admission._shares, []
    monkeypatch.setattr(admission, "_shares", lambda request, local: asked.append(request) or shares(request, local))
    assert [side.matched(request) for request in waiting] == [None] * 5
    assert not asked
    side.run()
    assert side.matched(waiting[0]) == 100
    assert asked


def test_slices_are_what_vllm_leaves_of_the_planned_time_and_a_share_at_least():
    side = running(miss_policy="fill-first")
    request = in_slices(side)
    assert [side.run(tokens=tokens).slice_tokens for tokens in (1, 20, 29, 30, 64)] == [37, 18, 9, 9, 9]
    side.report(costs={"blend": Line(8, 0.875)})  # a full step takes 64 s, of which a pass takes 8 in any case
    assert [side.run(tokens=tokens).slice_tokens for tokens in (1, 20, 21, 22, 64)] == [29, 10, 9, 9, 9]
    side.scheduler.loaded(["request"])
    assert side.run().slice_tokens == 0
    side.scheduler.finished(request)


@pytest.mark.parametrize(("step_tokens", "is_sliced"), [(100, False), (99, True)])
def test_alone_it_is_loaded_in_whole_steps(step_tokens, is_sliced):
    side = stored(miss_policy="fill-first", shape={"step_tokens": step_tokens})
    request = side.add(ask_about(FIRST, SECOND, **ALL))
    assert side.ask(request) == (100, is_sliced)
    side.give(request, 100)
    work = side.step()
    assert [load.is_sliced for load in work.loads] == [is_sliced]
    assert work.slice_tokens == (step_tokens if is_sliced else 0)


def test_a_request_that_arrives_with_a_long_one_waits_for_a_step_of_it_only():
    side = stored()
    long = side.add(make_request("long", text(80, 20 * STEP), FIRST, QUESTION))
    side.add(make_request("plain", text(82, 10)))
    assert side.ask(long) == (20 * STEP + 40, True)
    side.give(long, 20 * STEP + 40)
    work = side.step(scheduled={"plain": 10}, computed={"plain": 0}, new=frozenset(["plain"]))
    assert work.loads[0].is_sliced
    assert work.slice_tokens + 10 <= STEP


def test_it_is_alone_again_when_the_others_are_finished():
    side = stored(miss_policy="fill-first", shape={"step_tokens": 100})
    other = side.add(ask_about(FIRST, name="other"))
    side.begin(other)
    side.run("other", 10, 60)
    request = side.add(ask_about(FIRST, SECOND, **ALL))
    assert side.ask(request) == (100, True)
    side.scheduler.finished(other)
    assert side.ask(request) == (100, False)
    side.run("third")
    assert side.ask(request) == (100, True)
    side.step()  # in which no request gets a token
    assert side.ask(request) == (100, False)


def test_who_brings_nothing_is_not_loaded_in_slices():
    side = running()
    request = side.add(ask_about(FIRST, SECOND, **ALL))
    assert side.ask(request, 100) == (0, False)


def in_slices(side, name="request"):
    """A request that is being loaded in slices, and the step that begins it."""
    request = side.add(ask_about(FIRST, SECOND, name=name, **ALL))
    assert side.ask(request) == (100, True)
    side.give(request, 100)
    side.run()
    return request


def test_a_request_in_slices_gets_blocks_twice_and_is_loaded_once():
    side = running(miss_policy="fill-first")
    request = in_slices(side)
    side.scheduler.loaded(["request"])
    side.give(request, 0, local=100, more=10)
    work = side.run("request", 10, 100)
    assert not work.loads
    assert not work.released
    assert side.counts("requests") == {"reuse": 1}
    assert side.scheduler.finished(request)["reused_tokens"] == 0
    assert side.is_forgotten(request)


def test_after_a_preemption_it_may_be_loaded_in_slices_again():
    side = running(miss_policy="fill-first")
    request = in_slices(side)
    side.scheduler.loaded(["request"])
    side.give(request, 0, local=100, more=10)
    side.run("request", 10, 100)
    request.num_preemptions = 1
    side.run()
    assert side.ask(request) == (100, True)
    side.give(request, 100)
    [load] = side.run().loads
    assert load.is_sliced


def test_while_one_is_loaded_in_slices_steps_have_room_for_little():
    side = running(miss_policy="fill-first")
    in_slices(side, "a")
    for number in range(3):
        assert admitted(side, f"long {number}") is None
        request = side.add(ask_about(FIRST, SECOND, name=f"short {number}"))
        assert side.begin(request, 16)[0] == 84  # four tokens of the system prompt are computed
        side.run()
    side.scheduler.loaded(["a"])
    assert admitted(side, "b") == 100


def test_steps_are_full_until_the_last_of_several_is_loaded():
    side = running(miss_policy="fill-first")
    side.store(FIRST, SECOND, text(3, 30))
    request = side.add(ask_about(FIRST, SECOND, name="a", **ALL))
    other = side.add(ask_about(FIRST, SECOND, text(3, 30), name="b", **ALL))
    assert side.ask(request) == (100, True)
    assert side.ask(other) == (130, True)
    side.give(request, 100)
    side.give(other, 130)
    side.run()
    side.scheduler.loaded(["a"])
    assert admitted(side, "c") is None
    side.scheduler.loaded(["b"])
    assert admitted(side, "c") == 100


def test_what_is_aborted_between_slices_gives_the_step_back_when_workers_say_so():
    side = running(miss_policy="fill-first")
    request = in_slices(side, "a")
    side.scheduler.finished(request)
    assert admitted(side, "b") is None
    side.scheduler.loaded(["a"])
    assert admitted(side, "b") == 100
    assert side.is_forgotten(request)


def test_a_step_that_begins_a_request_in_slices_has_no_room_for_another():
    side = running(miss_policy="fill-first")
    request = side.add(ask_about(FIRST, SECOND, name="a", **ALL))
    side.ask(request)
    side.give(request, 100)
    assert admitted(side, "b") is None


QUESTIONS = {"shape": {"step_tokens": WIDE, "loads_questions": True}}


@pytest.mark.parametrize(
    ("question", "params", "end"),
    [
        (10, HALF, 109),
        (256, HALF, 355),
        (257, HALF, 100),  # a long question is vLLM's, whose steps have a limit of their own
        (1, HALF, 100),
        (10, {"recompute_ratio": 0.0}, 109),  # the system prompt is computed
    ],
)
def test_a_short_question_is_computed_with_the_load(question, params, end):
    """Except its last token, so that vLLM's step has one token of each request."""
    side = stored(shape={"step_tokens": 1024, "loads_questions": True})
    request = side.add(make_request("request", text(90, 20), FIRST, SECOND, text(91, question), **params))
    external, is_sliced = side.ask(request)
    assert external == end
    assert not is_sliced
    side.give(request, external, more=100 + question - end)
    [load] = side.step().loads
    assert (load.start, load.end) == (0, end)


@pytest.mark.parametrize("local", [16, 96])
def test_a_load_that_computes_nothing_leaves_the_question_to_vllm(local):
    """The last tokens of a system prompt, behind its last whole block, may be stored."""
    side = stored(**QUESTIONS)
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0.0))
    assert side.matched(request, local) == 100 - local


def test_behind_the_question_begins_nothing_is_loaded():
    side = stored(**QUESTIONS)
    request = side.add(make_request("request", text(90, 20), FIRST, SECOND, text(91, 50), **HALF))
    assert side.matched(request, 112) == 0
    side.give(request, 0, local=112, more=38)
    assert not side.step().loads


def test_a_question_takes_room_in_a_step():
    for loads_questions, count in ((False, 3), (True, 2)):
        side = stored(shape={"step_tokens": WIDE, "loads_questions": loads_questions})
        assert [admitted(side, name) is None for name in "abcd"] == [False] * count + [True] * (4 - count)


def test_a_preempted_request_is_loaded_to_the_same_token_again():
    side = stored(**QUESTIONS)
    request = side.add(ask_about(FIRST, SECOND, **HALF))
    external, _ = side.begin(request)
    side.step()
    request.num_preemptions += 1
    assert side.matched(request) == external == 109
