"""Random tokens: the baseline that every other policy has to beat."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Policy, Selection


@dataclass(frozen=True)
class RandomTokens(Policy):
    """Random tokens. The same prompt and seed always give the same tokens."""

    name: ClassVar[str] = "random"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        lot = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(assembled.chunk_tokens, generator=lot)[: assembled.affordable(ratio)]
        return Selection(tuple(assembled.positions()[order].sort().values.tolist()))
