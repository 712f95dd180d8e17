"""What a stage takes, fitted to what was measured."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvmosaic.engines.vllm.messages import Line

REMEMBERED = 64
"""Number of latest observations that count."""
ENOUGH = 8
"""Minimum observations for a prediction: kernels may be compiled more than once before all that is needed is
there."""
TOO_SLOW = 3.0
"""Outlier threshold: observations this many times slower than similar-sized or larger ones are discarded. A busy
machine, or a kernel's first launch, makes an observation far too slow."""
NEIGHBOURS = 3
"""Observations on either side, by size, that one is compared with; also the number of larger ones."""


class _Observation(NamedTuple):
    tokens: int
    seconds: float


class LinearCost:
    """Fits a line to the latest observations that can be believed."""

    def __init__(self) -> None:
        self._observations: deque[_Observation] = deque(maxlen=REMEMBERED)

    def observe(self, tokens: int, seconds: float) -> None:
        """``tokens`` took ``seconds``."""
        assert tokens > 0
        self._observations.append(_Observation(tokens, seconds))

    def line(self) -> Line | None:
        """The best line through zero tokens at zero or more seconds, with no negative slope."""
        if len(self._observations) < ENOUGH:
            return None
        return _fit(_believable(sorted(self._observations)))


def _believable(observations: Sequence[_Observation]) -> list[_Observation]:
    """Of observations by size those that are not far slower than some larger ones, nor, per token, than others of
    about their size. Not than all others: attention takes longer per token the more tokens there are."""
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
    # Observations of one size say nothing of the slope, and noise can turn it around.
    return Line(fixed, slope) if slope > 0 and fixed >= 0 else Line(0.0, seconds / tokens)
