"""The first tokens of every chunk."""

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Policy, Selection


@dataclass(frozen=True)
class SinkLink(Policy):
    """Computed alone, the first tokens of a chunk became attention sinks; in the prompt they are none. ``k`` tokens
    of every chunk, or with 0 as many as the ratio allows."""

    name: ClassVar[str] = "sink-link"
    picks_starts: ClassVar[bool] = True
    k: Annotated[int, Field(ge=0, lt=2**31)] = 0

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        chosen = first_tokens(assembled, assembled.affordable(ratio), self.k or None)
        return Selection(tuple(assembled.positions()[chosen].tolist()))


def first_tokens(assembled: AssembledPrompt, count: int, most: int | None = None) -> torch.Tensor:
    """``[chunk tokens]`` bool: ``count`` tokens, equally many from the start of every chunk where it has them, but
    not more than ``most`` of one. Left-overs go to the first chunks."""
    place = assembled.places
    allowed = np.ones(len(place), dtype=bool) if most is None else place < most
    if allowed.sum() > count:
        last = np.flatnonzero(allowed)[np.argsort(place[allowed], kind="stable")[count:]]
        allowed[last] = False
    return torch.from_numpy(allowed)
