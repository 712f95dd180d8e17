"""Where a backend keeps each number of a block, found by writing numbers and reading them back."""

from collections.abc import Sequence

import torch

from kvmosaic.engines.vllm.forward.kv_layers import KVLayers

DIGIT = 128
"""Bound below which integers are exact in every dtype that a cache of the model's own dtype can have."""


class BlockReader:
    """Reads K and V back from the blocks of a cache that the backend packed in an order of its own."""

    def __init__(self, kv: KVLayers, axis: int, order: torch.Tensor) -> None:
        """``order``: place of each number in a block; the numbers of K ``[heads, block_size, k_dim]`` come first,
        then V."""
        self._kv = kv
        self._axis = axis
        self._order = order

    @classmethod
    def measure(cls, kv: KVLayers) -> "BlockReader | None":
        """Measure the order. Returns ``None`` if blocks do not hold numbers as they were written, because numbers are
        rounded or shared between blocks. To be called before any block is in use."""
        cache = kv.layers[0].cache
        axes = [axis for axis, size in enumerate(cache.shape) if size == kv.num_blocks]
        if len(kv.block_sizes) > 1 or not axes:
            return None
        count = _num_elements(kv)
        place = torch.arange(count, device=kv.device)
        found = torch.zeros(cache.numel() // kv.num_blocks, dtype=torch.long, device=kv.device)
        weight = 1
        while weight < count + 1:  # counted from 1: an unwritten place must not look like the first number
            _write(kv, 0, 1, ((place + 1) // weight % DIGIT).to(cache.dtype))
            found += cache.select(axes[0], 1).reshape(-1).long() * weight
            weight *= DIGIT
        order = torch.argsort(found, stable=True)[-count:]
        reader = cls(kv, axes[0], order)
        if not torch.equal(found[order], place + 1):
            return None
        # The order found in one block of one layer has to hold everywhere.
        last = len(kv.layers) - 1
        numbers = torch.randn(count, device=kv.device).to(cache.dtype)
        _write(kv, last, 2, numbers)
        return reader if torch.equal(reader._block_numbers(last, [2])[0], numbers) else None

    def read(self, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, layers, tokens, k_dim]`` and V of positions ``start .. end-1`` of a sequence in ``blocks``."""
        layer, size = self._kv.layers[0], self._kv.block_sizes[0]
        used = blocks[start // size : -(-end // size)]
        inside = slice(start % size, start % size + end - start)
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index in range(len(self._kv.layers)):
            numbers = self._block_numbers(index, used)
            split = layer.kv_heads * size * layer.k_dim
            for kept, flat, dim in zip(
                found, (numbers[:, :split], numbers[:, split:]), (layer.k_dim, layer.v_dim), strict=True
            ):
                rows = flat.view(len(used), layer.kv_heads, size, dim).transpose(0, 1)
                kept.append(rows.reshape(layer.kv_heads, -1, dim)[:, inside])
        return torch.stack(found[0], dim=1), torch.stack(found[1], dim=1)

    def _block_numbers(self, layer: int, blocks: Sequence[int]) -> torch.Tensor:
        """The numbers of these blocks, in the order in which they were written, ``[blocks, numbers]``."""
        cache = self._kv.layers[layer].cache
        wanted = torch.tensor(list(blocks), device=cache.device)
        return cache.index_select(self._axis, wanted).movedim(self._axis, 0).reshape(len(blocks), -1)[:, self._order]


def _num_elements(kv: KVLayers) -> int:
    """Number of elements of a block."""
    layer = kv.layers[0]
    return int(layer.kv_heads * kv.block_sizes[0] * (layer.k_dim + layer.v_dim))


def _write(kv: KVLayers, index: int, block: int, numbers: torch.Tensor) -> None:
    """Have the backend write one block of a layer, K ``[heads, block_size, k_dim]`` first, then V."""
    layer, size = kv.layers[index], kv.block_sizes[0]
    split = layer.kv_heads * size * layer.k_dim
    k = numbers[:split].view(layer.kv_heads, size, layer.k_dim).transpose(0, 1).contiguous()
    v = numbers[split:].view(layer.kv_heads, size, layer.v_dim).transpose(0, 1).contiguous()
    kv.write(layer, k, v, torch.arange(block * size, (block + 1) * size, device=kv.device)[None])
