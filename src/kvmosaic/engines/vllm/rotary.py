"""The rotary tables of a vLLM model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvmosaic.core.rotation import CosSin


@dataclass(frozen=True)
class VllmTable:
    """The cos/sin cache of one of the model's rotary modules."""

    module: Any

    @property
    def tensor(self) -> torch.Tensor:
        """``[positions, width]``: cos, then sin."""
        both: torch.Tensor | None = getattr(self.module, "long_short_cos_sin_cache", None)
        if both is None:
            return self.module.cos_sin_cache
        # Two tables one after the other; vLLM picks one when it starts.
        return both[self.module.original_max_position_embeddings :] if self.module.use_long_rope else both

    def rows(self, positions: Sequence[int], sequence_length: int) -> CosSin:
        """Table rows at ``positions``; vLLM's tables do not depend on the sequence's length."""
        rows = self.tensor[torch.as_tensor(positions, device=self.tensor.device)].float()
        cos, sin = rows.chunk(2, dim=-1)
        return CosSin(cos, sin)


def find_tables(model: torch.nn.Module) -> list[VllmTable]:
    """All rotary tables of the model, each once."""
    modules = {
        id(module): module
        for module in model.modules()
        if hasattr(module, "cos_sin_cache") or hasattr(module, "long_short_cos_sin_cache")
    }
    return [VllmTable(module) for module in modules.values()]
