"""What policies say of themselves is true: ``reads_content`` and ``picks_starts``. vLLM's engine relies on both."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.blend import POLICIES, Policy, Selection, choose, policy_named
from kvmosaic.core.prompt import Span
from tests.blend.drawn import SPECS, Drawn, contents, places

RATIOS = st.floats(0.01, 0.99)


def check_content(policy, one, other, ratio):
    """``one`` and ``other`` have their chunks at the same places. They differ in tokens, KV and question."""
    chosen = [choose(policy, prompt, ratio) for prompt in (one, other)]
    assert policy.reads_content or chosen[0] == chosen[1], (
        f"{policy.name} says reads_content = False, but its choice depends on more than the places of chunks"
    )


def check_starts(policy, prompt, ratio):
    """Whatever is chosen of a chunk is its beginning."""
    chosen = set(choose(policy, prompt, ratio).positions)
    inner = [
        position
        for span in prompt.prompt.chunks
        for position in span.positions
        if position in chosen and position > span.start and position - 1 not in chosen
    ]
    assert not policy.picks_starts or not inner, (
        f"{policy.name} says picks_starts = True, but it chose position {inner[0]} without the one before it"
    )


def test_every_policy_is_tested():
    assert {policy_named(spec).name for spec in SPECS} == set(POLICIES), "a policy is missing in SPECS"


@given(places(), contents(), contents(), st.sampled_from(SPECS), RATIOS)
def test_a_choice_does_not_depend_on_content_that_the_policy_does_not_read(place, content, other, spec, ratio):
    check_content(policy_named(spec), Drawn(**place, **content), Drawn(**place, **other), ratio)


@given(places(), contents(), st.sampled_from(SPECS), RATIOS)
def test_policies_that_pick_starts_pick_nothing_else(place, content, spec, ratio):
    check_starts(policy_named(spec), Drawn(**place, **content), ratio)


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.can_skip_probe])
def test_a_policy_that_can_skip_its_probe_spends_the_budget_without(name):
    prompt = Drawn(lengths=[40] * 9, system=3, question=20, layers=30, full=range(30), seed=0)
    prompt.asked = Span(prompt.asked.start, prompt.asked.start)
    chosen = choose(policy_named(name), prompt, 0.4)
    assert prompt.charged == 0
    assert len(chosen.positions) == int(0.4 * prompt.chunk_tokens)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_says_less_of_itself_than_is_true(name):
    """Otherwise vLLM's prefix cache, and layers with a sliding window, would be used less than they could be."""
    shape = {"lengths": [40] * 9, "system": 3, "question": 20, "layers": 30, "full": range(30)}
    policy, prompts = policy_named(name), [Drawn(**shape, seed=seed) for seed in range(2)]
    [one, other] = [choose(policy, prompt, 0.4).positions for prompt in prompts]
    assert policy.reads_content == (one != other), f"{name}: reads_content"
    starts = {span.start for span in prompts[0].prompt.chunks}
    is_inside = any(position not in starts and position - 1 not in one for position in one)
    assert policy.picks_starts == (not is_inside), f"{name}: picks_starts"


class Repeats(Policy):
    """Chooses tokens that occurred before, which only prompts with repeated tokens show."""

    name = "repeats"

    def select(self, assembled, ratio):
        ids, found = assembled.prompt.token_ids, []
        for position in assembled.positions().tolist():
            if ids[position] in ids[:position] and len(found) < assembled.affordable(ratio):
                found.append(position)
        return Selection(tuple(found))


class Ends(Policy):
    """Chooses the end of the last chunk."""

    name = "ends"
    picks_starts = True

    def select(self, assembled, ratio):
        positions = assembled.positions().tolist()
        return Selection(tuple(positions[len(positions) - assembled.affordable(ratio) :]))


def test_a_policy_that_reads_tokens_without_saying_so_is_found():
    @given(places(), contents(), contents(), RATIOS)
    def check(place, content, other, ratio):
        check_content(Repeats(), Drawn(**place, **content), Drawn(**place, **other), ratio)

    with pytest.raises(AssertionError, match="repeats says reads_content = False"):
        check()


def test_a_policy_that_picks_other_tokens_without_saying_so_is_found():
    @given(places(), contents(), RATIOS)
    def check(place, content, ratio):
        check_starts(Ends(), Drawn(**place, **content), ratio)

    with pytest.raises(AssertionError, match="ends says picks_starts = True"):
        check()
