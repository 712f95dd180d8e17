"""K and V read back from blocks in which each has a tensor of its own."""

from collections.abc import Sequence

import torch

from kvmosaic.engines.vllm.forward.kv_layers import KVLayers
from kvmosaic.engines.vllm.paged.layout_probe import BlockReader


class PairReader:
    """Reads with torch operations. The sibling of :class:`BlockReader` for layers whose layout is known."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """``pairs``: for each layer the caches of K and V, ``[blocks, block_size, kv_heads, dim]``."""
        self._pairs = pairs

    def read(self, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, layers, tokens, k_dim]`` and V of positions ``start .. end-1`` of a sequence in ``blocks``."""
        size, device = self._pairs[0][0].shape[1], self._pairs[0][0].device
        used = torch.tensor(list(blocks[start // size : -(-end // size)]), device=device)
        inside = slice(start % size, start % size + end - start)
        # [tokens, heads, dim] of each layer
        k, v = ([cache[used].flatten(0, 1)[inside] for cache in caches] for caches in zip(*self._pairs, strict=True))
        return torch.stack(k).permute(2, 0, 1, 3), torch.stack(v).permute(2, 0, 1, 3)


def block_reader(kv: KVLayers, dtype: torch.dtype) -> BlockReader | PairReader | None:
    """A reader of these caches; ``None`` if they cannot be read. ``dtype`` is that of K and V. To be called before
    any block is in use."""
    return BlockReader.measure(kv, dtype) if kv.pairs is None else PairReader(kv.pairs)
