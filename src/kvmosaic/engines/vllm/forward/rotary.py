"""The rotary tables of a vLLM model, and how its keys turn by them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvmosaic.core.rotation import CosSin
from kvmosaic.engines.rotary import LayerRotary, explain_layer
from kvmosaic.engines.vllm.forward.runs import Row
from kvmosaic.engines.vllm.forward.sparse import SparseForward

ANY_LENGTH = 0
"""vLLM's rotary tables, and so its keys, do not depend on a prompt's length."""


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


def measure_rotary(
    forward: SparseForward, model: torch.nn.Module, blocks: Sequence[Sequence[int]]
) -> list[LayerRotary | None]:
    """Compute the same tokens at two places and explain what changed, layer by layer. Nobody uses ``blocks``."""
    tokens = list(range(3, 15))
    old, new = range(len(tokens)), range(29, 29 + len(tokens))
    row = Row(tokens, 0, blocks)
    at_old, at_new = forward.capture([row]), forward.capture([row], shift=new.start)
    tables = find_tables(model)
    return [
        explain_layer(
            layer,
            (at_old[0][layer].transpose(0, 1), at_old[1][layer].transpose(0, 1)),
            (at_new[0][layer].transpose(0, 1), at_new[1][layer].transpose(0, 1)),
            old,
            new,
            tables,
        )
        for layer in range(len(forward.layers))
    ]


def find_tables(model: torch.nn.Module) -> list[VllmTable]:
    """All rotary tables of the model, each once."""
    modules = {
        id(module): module
        for module in model.modules()
        if hasattr(module, "cos_sin_cache") or hasattr(module, "long_short_cos_sin_cache")
    }
    return [VllmTable(module) for module in modules.values()]
