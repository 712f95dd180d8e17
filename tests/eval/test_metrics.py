"""Metrics: properties for any input, and a few values that were computed by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.eval.metrics import bootstrap, exact_match, first_line, kl_per_token, normalise, word_f1

words = st.lists(st.sampled_from(["the", "a", "red", "Cat", "house", "42", "sea"]), min_size=1, max_size=6)
texts = words.map(" ".join)


@given(st.text())
def test_normalising_twice_changes_nothing(text):
    once = normalise(text)
    assert normalise(once) == once
    assert once == once.strip()


def test_normalising_by_hand():
    assert normalise("  The U.S.A., and  an apple! ") == "usa and apple"


@given(texts, st.lists(texts, min_size=1, max_size=3))
def test_f1_is_a_share_and_agrees_with_exact_match(answer, gold):
    f1 = word_f1(answer, gold)
    assert 0 <= f1 <= 1
    if exact_match(answer, gold):
        assert f1 == 1
    assert f1 == max(word_f1(answer, [right]) for right in gold)


@given(texts, texts)
def test_f1_is_symmetric(one, other):
    assert word_f1(one, [other]) == word_f1(other, [one])


def test_f1_by_hand():
    assert word_f1("The red house", ["a red sea"]) == pytest.approx(0.5)
    assert word_f1("red red", ["red"]) == pytest.approx(2 / 3)
    assert word_f1("", ["red"]) == 0
    assert word_f1("the", ["an"]) == 1  # nothing is left of either


def test_only_the_first_line_counts():
    assert first_line("\n  Paris. \nQuestion: and then?") == "Paris."


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_kl_is_never_negative_and_ignores_a_common_shift(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(rows, 50, generator=generator) * 5 for _ in range(2))
    assert kl_per_token(p, p + 3) == pytest.approx([0] * rows, abs=1e-6)
    assert all(kl > 0 for kl in kl_per_token(p, q))
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p.double()), torch.distributions.Categorical(logits=q.double())
    )
    assert kl_per_token(p, q) == pytest.approx(wanted.tolist())


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.integers(0, 9))
def test_an_interval_holds_its_mean_and_is_deterministic(values, seed):
    interval = bootstrap(values, seed)
    assert interval.mean == pytest.approx(np.mean(values))
    slack = 1e-9 * (1 + abs(interval.mean))
    assert min(values) - slack <= interval.low <= interval.high <= max(values) + slack
    assert interval == bootstrap(values, seed)


def test_intervals_cover_the_truth():
    """About 95 % of the intervals of samples must contain their known mean."""
    rng = np.random.default_rng(0)
    inside = [(it := bootstrap(rng.normal(1.0, 2.0, 40), seed)).low <= 1.0 <= it.high for seed in range(200)]
    assert 0.88 <= np.mean(inside) <= 0.99
