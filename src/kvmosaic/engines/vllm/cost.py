"""What things take, as measured, and what they will take, as predicted."""

from typing import NamedTuple

MEMORY = 0.98
"""How much an observation still counts when the next one is made."""


class Line(NamedTuple):
    """``fixed + per_token · tokens`` seconds."""

    fixed: float
    per_token: float

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.per_token * tokens if tokens else 0.0


class LinearCost:
    """Fits a line to the latest observations, the older the less it counts."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        new = (1.0, tokens, seconds, tokens**2, tokens * seconds)
        self._weight, self._x, self._y, self._xx, self._xy = (
            MEMORY * old + value for old, value in zip(sums, new, strict=True)
        )

    def line(self) -> Line:
        """The best line through zero tokens at zero or more seconds, with no negative slope."""
        spread = self._weight * self._xx - self._x**2
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else -1.0
        fixed = (self._y - slope * self._x) / self._weight
        # Observations of one size say nothing of the slope, and noise can turn it around.
        return Line(fixed, slope) if slope > 0 and fixed >= 0 else Line(0.0, self._y / self._x)
