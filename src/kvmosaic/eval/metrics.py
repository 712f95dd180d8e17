"""Metrics for the quality of answers, and their confidence intervals."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """As SQuAD's own script does: lower case, no punctuation, no articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def first_line(text: str) -> str:
    """The part of a text that counts as the answer; base models continue with another question."""
    return text.strip().partition("\n")[0].strip()


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1.0 if the normalised answer is one of the right ones, else 0.0."""
    return float(normalise(answer) in map(normalise, gold))


def word_f1(answer: str, gold: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words; the best over all right answers."""
    return max(_f1(normalise(answer).split(), normalise(right).split()) for right in gold)


def _f1(answer: list[str], right: list[str]) -> float:
    if not answer or not right:
        return float(answer == right)
    common = sum((Counter(answer) & Counter(right)).values())
    return 2 * common / (len(answer) + len(right))


def kl_per_token(reference: torch.Tensor, logits: torch.Tensor) -> list[float]:
    """KL divergence in nats of ``softmax(logits)`` from ``softmax(reference)``, by row; both ``[tokens, vocab]``."""
    p, q = (part.double().log_softmax(-1) for part in (reference, logits))
    # Rounding can make the sum of a perfect match slightly negative.
    return (p.exp() * (p - q)).sum(-1).clamp_min(0).tolist()


class Interval(NamedTuple):
    """A mean and the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


RESAMPLES = 2000


def bootstrap(values: npt.ArrayLike, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean over examples. For a paired comparison, give the differences."""
    sample = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(len(sample), size=(RESAMPLES, len(sample)))
    low, high = np.quantile(sample[draws].mean(axis=1), (0.025, 0.975))
    return Interval(float(sample.mean()), float(low), float(high))
