"""The state of a request with chunks."""

import time
from dataclasses import replace

import pytest

from kvmosaic.core.prompt import Span
from kvmosaic.engines.vllm.parameters import RequestParameters
from kvmosaic.engines.vllm.scheduler_side.planner import Planner
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    QUESTION,
    SECOND,
    SYSTEM,
    ask_about,
    digest_of,
    make_request,
    make_setup,
    make_shape,
    text,
)


def plan(request):
    setup = make_setup(make_shape())
    params = RequestParameters.read(request.kv_transfer_params, setup.config.allowed_parameters)
    return Planner(setup.config, setup.parser, setup.sink, setup.shape, StoreMirror(1)).plan(request, params).outcome


def test_chunks_that_end_behind_a_position():
    ours = plan(ask_about(FIRST, SECOND))
    both = [(Span(20, 60), digest_of(FIRST)), (Span(60, 100), digest_of(SECOND))]
    assert ours.chunks_from(0) == ours.chunks_from(59) == both
    assert ours.chunks_from(60) == ours.chunks_from(99) == both[1:]
    assert ours.chunks_from(100) == []


def test_it_is_begun_when_the_prefix_cache_ends_inside_a_chunk():
    ours = plan(ask_about(FIRST, SECOND))
    assert [local for local in range(110) if ours.begins_inside(local)] == [*range(21, 60), *range(61, 100)]


@pytest.mark.parametrize(
    ("ratio", "policy", "is_probed"),
    [
        (0.5, "composite", True),
        (0.5, "kv-deviation", True),
        (0.5, "sink-link", False),
        (0.5, "random", False),
        (0.0, "composite", False),
        (1.0, "composite", False),
    ],
)
def test_which_policies_look_at_the_prompt(ratio, policy, is_probed):
    assert plan(ask_about(FIRST, recompute_ratio=ratio, policy=policy)).is_probed is is_probed


def test_it_has_arrived_when_all_ranks_have_fetched():
    ours = plan(ask_about(FIRST))
    assert (ours.has_fetched, ours.has_arrived) == (False, False)
    ours.arrived(0, frozenset(), {})  # a rank answers an earlier fetch
    ours.wait_for(2)
    assert (ours.has_fetched, ours.has_arrived) == (True, False)
    ours.arrived(1, frozenset(), {})
    ours.arrived(1, frozenset(), {})
    assert not ours.has_arrived
    ours.arrived(0, frozenset(), {})
    assert ours.has_arrived
    ours.reset_after_alloc()
    assert (ours.has_fetched, ours.has_arrived) == (False, False)


def test_patience_begins_when_it_is_first_asked_for_and_anew_after_blocks(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ours = plan(ask_about(FIRST))
    now = 200.0
    assert ours.has_patience(30)
    now = 229.9
    assert ours.has_patience(30)
    now = 230.0
    assert not ours.has_patience(30)
    ours.reset_after_alloc()
    assert ours.has_patience(30)
    now = 260.0
    assert not ours.has_patience(30)


def salts(*parts, **params):
    return plan(make_request("a", *(parts or (SYSTEM, FIRST, SECOND, QUESTION)), **params)).salts(make_shape())


def test_salts_follow_one_another():
    ours = salts()
    assert [(salt.first, salt.end) for salt in ours] == [(1, 3), (3, 6), (6, None)]
    assert len({salt.digest for salt in ours}) == 3


def test_what_its_salts_depend_on():
    def last(*parts, **params):
        return salts(*parts, **params)[-1].digest

    assert last(recompute_ratio=0.5) == last(recompute_ratio=0.5)
    assert len({last(recompute_ratio=ratio) for ratio in (0, 0.1, 0.2)}) == 3
    assert last(SYSTEM, FIRST, SECOND, QUESTION) != last(SYSTEM, [*FIRST, *SECOND], QUESTION)
    blends = {last(recompute_ratio=0.5, policy=policy) for policy in ("random", "random(seed=1)", "sink-link")}
    assert len(blends) == 3
    assert last(recompute_ratio=0, policy="random") == last(recompute_ratio=0, policy="composite")
    assert salts(recompute_ratio=1.0) == []


@pytest.mark.parametrize(("policy", "differs"), [("composite", True), ("sink-link", False)])
def test_its_salts_depend_on_the_question_if_that_is_looked_at(policy, differs):
    both = [
        salts(SYSTEM, FIRST, question, recompute_ratio=0.5, policy=policy)
        for question in (QUESTION, [*QUESTION[:-1], 7])
    ]
    assert (both[0] != both[1]) is differs


def test_salts_of_a_conversation_take_linear_time():
    """Every second turn has no question, so its chunk's KV depends on all later text."""
    ours = plan(
        make_request("a", SYSTEM, *(text(number, 40) for number in range(1, 81)), QUESTION, recompute_ratio=0.5)
    )
    length = len(ours.prompt.token_ids)
    ends = [length if index % 2 else span.end for index, span in enumerate(ours.prompt.chunks)]
    mixed = replace(ours, turn_ends=tuple(ends))
    assert sum(len(what) for _, what in mixed._salted_by(make_shape())) < 3 * 4 * length
    # A turn without a question depends on everything behind it.
    ends[0] = length
    early = replace(ours, turn_ends=tuple(ends))
    changed = replace(early, prompt=replace(early.prompt, token_ids=(*early.prompt.token_ids[:-1], 7)))
    assert early.salts(make_shape()) != changed.salts(make_shape())
    assert early.salts(make_shape())[0] != changed.salts(make_shape())[0]
