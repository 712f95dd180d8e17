"""The two extremes: recompute nothing, or everything."""

from typing import ClassVar

from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Policy, Selection


@dataclass(frozen=True)
class RecomputeNone(Policy):
    """Recomputes nothing: chunks are used as they were computed alone."""

    name: ClassVar[str] = "none"
    picks_starts: ClassVar[bool] = True

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        return Selection()


@dataclass(frozen=True)
class RecomputeAll(Policy):
    """Recomputes every chunk token, whatever the ratio. The result is that of a full prefill."""

    name: ClassVar[str] = "all"
    picks_starts: ClassVar[bool] = True
    keeps_ratio: ClassVar[bool] = False

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        return Selection(tuple(assembled.positions().tolist()))
