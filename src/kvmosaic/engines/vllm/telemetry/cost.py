"""Cost of a stage: a line fitted to measured times."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvmosaic.engines.vllm.messages import Line

REMEMBERED = 64
"""Number of latest observations that are used."""
ENOUGH = 8
"""Minimum number of observations for a prediction: kernels may be compiled several times before all needed variants
exist."""
TOO_SLOW = 3.0
"""Outlier threshold: observations this many times slower than similar-sized or larger ones are discarded. A busy
machine, or a kernel's first launch, makes an observation far too slow."""
NEIGHBOURS = 3
"""Number of neighbours on either side, by size, that an observation is compared with. Among all larger observations,
it is compared with the one of this rank, counted from the fastest."""


class _Observation(NamedTuple):
    tokens: int
    seconds: float


class LinearCost:
    """Fits a line to the latest observations, without outliers."""

    def __init__(self) -> None:
        self._observations: deque[_Observation] = deque(maxlen=REMEMBERED)

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that ``tokens`` took ``seconds``."""
        assert tokens > 0
        self._observations.append(_Observation(tokens, seconds))

    def line(self) -> Line | None:
        """The best line with no negative fixed cost and no negative slope; ``None`` if there are too few
        observations."""
        if len(self._observations) < ENOUGH:
            return None
        return _fit(_believable(sorted(self._observations)))


def _believable(observations: Sequence[_Observation]) -> list[_Observation]:
    """The observations, sorted by size, without outliers: those that are far slower than some larger ones or, per
    token, than others of similar size. They are not compared with all others per token, because attention takes
    longer per token the more tokens there are."""
    observations, larger = list(observations), list[float]()
    for index in reversed(range(len(observations))):
        seconds = observations[index].seconds
        if len(larger) >= NEIGHBOURS and seconds > TOO_SLOW * larger[NEIGHBOURS - 1]:
            del observations[index]
        insort(larger, seconds)
    paces = [each.seconds / each.tokens for each in observations]
    believable = []
    for index, (each, pace) in enumerate(zip(observations, paces, strict=True)):
        near = sorted(paces[max(0, index - NEIGHBOURS) : index + NEIGHBOURS + 1])
        if pace <= TOO_SLOW * near[(len(near) - 1) // 2]:
            believable.append(each)
    return believable


def _fit(observations: Sequence[_Observation]) -> Line:
    count = len(observations)
    tokens = sum(each.tokens for each in observations)
    seconds = sum(each.seconds for each in observations)
    squares = sum(each.tokens**2 for each in observations)
    spread = count * squares - tokens**2
    products = sum(each.tokens * each.seconds for each in observations)
    slope = (count * products - tokens * seconds) / spread if spread > 1e-9 * squares else -1.0
    fixed = (seconds - slope * tokens) / count
    # Observations of one size say nothing about the slope, and noise can make it negative.
    return Line(fixed, slope) if slope > 0 and fixed >= 0 else Line(0.0, seconds / tokens)
