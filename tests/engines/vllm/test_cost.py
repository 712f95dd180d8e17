"""Predictions from measured times, some of which are far too long because the machine is busy."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.engines.vllm.telemetry.cost import ENOUGH, LinearCost


def measured(observations):
    cost = LinearCost()
    for tokens, seconds in observations:
        cost.observe(tokens, seconds)
    return cost.line()


@given(st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.integers(0))
def test_a_line_is_found_among_delays(fixed, per_token, seed):
    """This works as long as delays are not the rule for any size."""
    chance, observations = random.Random(seed), []
    for number, tokens in enumerate(sorted(chance.randint(1000, 30000) for _ in range(64))):
        seconds = fixed + per_token * tokens
        observations.append((tokens, seconds * (50 if number % 4 == seed % 4 else 1)))
    chance.shuffle(observations)
    line = measured(observations)
    for tokens in (100, 5000, 30000):
        assert line.seconds(tokens) == pytest.approx(fixed + per_token * tokens, rel=1e-3)


def test_long_prompts_are_believed_though_they_are_slower():
    """Attention takes longer per token the more tokens there are."""

    def seconds(tokens):
        return 1e-5 * tokens * (1 + tokens / 16000)

    sizes = [32000 if number % 6 == 0 else random.randint(500, 2000) for number in range(60)]
    assert measured([(tokens, seconds(tokens)) for tokens in sizes]).seconds(32000) > 0.8 * seconds(32000)


@given(st.lists(st.tuples(st.integers(1, 10**5), st.floats(0, 1e3)), min_size=ENOUGH))
def test_any_observations_give_a_line_that_rises(observations):
    line = measured(observations)
    assert line.fixed >= 0
    assert line.per_token >= 0
    assert line.seconds(0) == 0


def test_a_first_launch_that_compiled():
    later = [(288, random.uniform(0.01, 0.012)) for _ in range(ENOUGH - 1)]
    assert measured([(288, 9.0), *later[1:]]) is None
    assert measured([(288, 9.0), *later]).seconds(288) < 0.02


def test_first_launches_that_compiled_for_several_sizes():
    first = [(tokens, random.uniform(0.3, 0.6)) for tokens in (512, 1024, 1536)]
    later = [(tokens, 1e-6 * tokens) for tokens in random.sample(range(2000, 7000), ENOUGH - len(first))]
    assert measured([*first, *later]).seconds(7000) < 0.02


def test_what_is_no_longer_so_is_forgotten():
    sizes = [random.randint(1, 5000) for _ in range(64)]
    observations = [(tokens, per_token * tokens) for per_token in (1e-3, 1e-5) for tokens in sizes]
    assert measured(observations).seconds(1000) == pytest.approx(1e-2)
