"""The first tokens of every chunk."""

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Policy, Selection


@dataclass(frozen=True)
class SinkLink(Policy):
    """The first ``k`` tokens of every chunk, or with ``k=0`` as many as the ratio allows. When a chunk is computed
    alone, its first tokens become attention sinks. In the prompt they are not sinks."""

    name: ClassVar[str] = "sink-link"
    picks_starts: ClassVar[bool] = True
    k: Annotated[int, Field(ge=0, lt=2**31)] = 0

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        chosen = first_tokens(assembled, assembled.affordable(ratio), self.k or None)
        return Selection(tuple(assembled.positions()[chosen].tolist()))


def first_tokens(assembled: AssembledPrompt, count: int, most: int | None = None) -> torch.Tensor:
    """``[chunk tokens]`` bool: up to ``count`` tokens, the same number from the start of every chunk that is long
    enough, and at most ``most`` per chunk. The remainder goes to the first chunks."""
    place = assembled.places
    allowed = np.ones(len(place), dtype=bool) if most is None else place < most
    if allowed.sum() > count:
        last = np.flatnonzero(allowed)[np.argsort(place[allowed], kind="stable")[count:]]
        allowed[last] = False
    return torch.from_numpy(allowed)
