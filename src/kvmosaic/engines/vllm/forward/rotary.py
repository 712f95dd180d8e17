"""The rotary tables of a vLLM model, and how they rotate its keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvmosaic.core.rotation import CosSin
from kvmosaic.engines.rotary import LayerRotary, explain_layer
from kvmosaic.engines.vllm.compat.rotary import rotary_modules, rotary_table
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward


@dataclass(frozen=True)
class VllmTable:
    """The cos/sin cache of one of the model's rotary modules."""

    module: Any

    @property
    def tensor(self) -> torch.Tensor:
        """``[positions, width]``: cos, then sin."""
        return rotary_table(self.module)

    def rows(self, positions: Sequence[int], sequence_length: int) -> CosSin:
        """Table rows at ``positions``; vLLM's tables do not depend on the sequence's length."""
        rows = self.tensor[torch.as_tensor(positions, device=self.tensor.device)].float()
        cos, sin = rows.chunk(2, dim=-1)
        return CosSin(cos, sin)


def measure_rotary(
    forward: SparseForward, models: Sequence[torch.nn.Module], first_layer: int
) -> list[LayerRotary | None]:
    """Compute the same tokens at two positions and explain the difference, layer by layer as in entries. ``models``:
    the model, and the draft model if its layers are among these. ``first_layer``: number of this rank's first layer
    in the whole model. To be called before any block is in use."""
    tokens = list(range(3, 15))
    # Some draft models (MTP) read the first token of a sequence in another way.
    first = 1 if forward.kv.drafts else 0
    old, new = range(first, first + len(tokens)), range(29, 29 + len(tokens))
    run = Run(tokens, 0, forward.kv.free_blocks)
    at_old, at_new = forward.capture([run], shift=old.start), forward.capture([run], shift=new.start)
    tables = [VllmTable(module) for model in models for module in rotary_modules(model)]
    return [
        explain_layer(
            first_layer + layer,
            (at_old[0][layer].transpose(0, 1), at_old[1][layer].transpose(0, 1)),
            (at_new[0][layer].transpose(0, 1), at_new[1][layer].transpose(0, 1)),
            old,
            new,
            tables,
            is_quantised=forward.kv.is_quantised,
        )
        for layer in range(len(forward.kv.kept))
    ]
