"""What things take, as measured, and what they will take, as predicted."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

REMEMBERED = 64
"""Observations that count."""
CALM = 0.75
"""The part of them that is believed. A busy machine, or a kernel's first launch, makes the others far too slow;
nothing makes an observation too fast."""
HOPE = 0.97
"""Each time in a row that something was judged too slow to do, it is taken to be faster by this: only what is done is
measured again, and a misjudgement must not last."""


class Line(NamedTuple):
    """``fixed + per_token · tokens`` seconds."""

    fixed: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens if tokens else 0.0


class _Observation(NamedTuple):
    tokens: int
    seconds: float


class LinearCost:
    """Fits a line to the latest observations, less the slowest."""

    def __init__(self) -> None:
        self._observations: deque[_Observation] = deque(maxlen=REMEMBERED)

    def observe(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        assert tokens > 0
        self._observations.append(_Observation(tokens, seconds))

    def line(self) -> Line:
        """The best line through zero tokens at zero or more seconds, with no negative slope."""
        line = _fit(self._observations)
        by_slowness = sorted(self._observations, key=lambda each: each.seconds / max(line.seconds(each.tokens), 1e-9))
        return _fit(by_slowness[: max(1, int(CALM * len(by_slowness)))])


class Judge:
    """Whether to do something that is predicted to take so long, rather than something else."""

    def __init__(self) -> None:
        self._refusals = 0

    def is_faster(self, predicted: float, otherwise: float) -> bool:
        """``predicted`` and ``otherwise``: seconds."""
        faster = predicted * HOPE**self._refusals < otherwise
        self._refusals = 0 if faster else self._refusals + 1
        return faster


def _fit(observations: Sequence[_Observation] | deque[_Observation]) -> Line:
    count = len(observations)
    tokens = sum(each.tokens for each in observations)
    seconds = sum(each.seconds for each in observations)
    squares = sum(each.tokens**2 for each in observations)
    spread = count * squares - tokens**2
    products = sum(each.tokens * each.seconds for each in observations)
    slope = (count * products - tokens * seconds) / spread if spread > 1e-9 * squares else -1.0
    fixed = (seconds - slope * tokens) / count
    # Observations of one size say nothing of the slope, and noise can turn it around.
    return Line(fixed, slope) if slope > 0 and fixed >= 0 else Line(0.0, seconds / tokens)
