"""What is predicted from measured times, some of which a busy machine made far too long."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.engines.vllm.cost import Judge, LinearCost


@given(st.floats(0, 0.1), st.floats(1e-6, 1e-3), st.integers(0))
def test_a_line_is_found_among_delays(fixed, per_token, seed):
    cost, chance = LinearCost(), random.Random(seed)
    for number in range(40):
        tokens = chance.randint(1, 5000)
        delay = 50 * (fixed + per_token * tokens) if number % 8 == 0 else 0
        cost.observe(tokens, fixed + per_token * tokens + delay)
    for tokens in (100, 5000):
        assert cost.line().seconds(tokens) == pytest.approx(fixed + per_token * tokens, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 10**5), st.floats(0, 1e3)), min_size=1))
def test_any_observations_give_a_line_that_rises(observations):
    cost = LinearCost()
    for tokens, seconds in observations:
        cost.observe(tokens, seconds)
    line = cost.line()
    assert line.fixed >= 0
    assert line.per_token >= 0
    assert line.seconds(0) == 0


def test_one_size_and_a_first_launch_that_compiled():
    cost = LinearCost()
    for seconds in (9.0, 0.01, 0.012):
        cost.observe(288, seconds)
    assert cost.line().seconds(288) < 0.02


def test_what_is_no_longer_so_is_forgotten():
    cost = LinearCost()
    for per_token in (1e-3, 1e-5):
        for _ in range(64):
            tokens = random.randint(1, 5000)
            cost.observe(tokens, per_token * tokens)
    assert cost.line().seconds(1000) == pytest.approx(1e-2)


@pytest.mark.parametrize("slower", [1.5, 10.0])
def test_what_is_judged_too_slow_is_tried_again_now_and_then(slower):
    judge = Judge()
    tried = [judge.is_faster(slower, 1.0) for _ in range(1000)]
    assert 0 < sum(tried) < 100
    assert not any(tried[:5])
    assert judge.is_faster(0.9, 1.0)
    assert not judge.is_faster(slower, 1.0)
