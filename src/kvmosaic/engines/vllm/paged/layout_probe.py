"""Where a backend keeps each number of a block, found by writing numbers and reading them back."""

from collections.abc import Sequence

import torch

from kvmosaic.engines.vllm.compat.layers import KVLayer
from kvmosaic.engines.vllm.forward.kv_layers import KVLayers

DIGIT, QUANTISED_DIGIT = 128, 8
"""Bounds below which integers are exact in every dtype that a model has, and in every dtype of a quantised cache."""
OUTWARD = 1 + 2**-7
"""Factor of numbers that are read from a quantised cache. Without it, vLLM's CPU writer, which rounds towards zero,
would store a smaller number. It is too small to reach the next larger one."""


class BlockReader:
    """Reads K and V back from the blocks of a cache that the backend packed in an order of its own. K and V from a
    quantised cache are rounded. Written again at the same positions, they give the same numbers."""

    def __init__(self, kv: KVLayers, dtype: torch.dtype, axis: int, order: torch.Tensor) -> None:
        """``dtype`` is that of K and V; ``order`` the place of each number in a block. The numbers of K ``[heads,
        block_size, k_dim]`` come first, then V."""
        self._kv = kv
        self._dtype = dtype
        self._axis = axis
        self._order = order

    @classmethod
    def measure(cls, kv: KVLayers, dtype: torch.dtype) -> "BlockReader | None":
        """Measure the order. Returns ``None`` if blocks do not hold numbers as they were written, because numbers are
        shared between blocks, or rounded in a way that we do not know. ``dtype`` is that of K and V. To be called
        before any block is in use."""
        cache = kv.layers[0].cache
        axes = [axis for axis, size in enumerate(cache.shape) if size == kv.num_blocks]
        if len(kv.block_sizes) > 1 or not axes:
            return None
        count = _num_elements(kv)
        place = torch.arange(count, device=kv.device)
        found = torch.zeros(cache.numel() // kv.num_blocks, dtype=torch.long, device=kv.device)
        weight, digit = 1, QUANTISED_DIGIT if kv.is_quantised else DIGIT
        while weight < count + 1:  # counted from 1: an unwritten place must not look like the first number
            _write(kv, 0, 1, ((place + 1) // weight % digit).to(dtype))
            found += _cached_numbers(kv.layers[0], cache.select(axes[0], 1).reshape(-1)).long() * weight
            weight *= digit
        order = torch.argsort(found, stable=True)[-count:]
        reader = cls(kv, dtype, axes[0], order)
        if not torch.equal(found[order], place + 1):
            return None
        # The order found in one block of one layer has to hold everywhere.
        return reader if all(reader._reads_what_was_written(index) for index in range(len(kv.kept))) else None

    def read(self, blocks: Sequence[int], start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, layers, tokens, k_dim]`` and V of positions ``start .. end-1`` of a sequence in ``blocks``."""
        layer, size = self._kv.layers[0], self._kv.block_sizes[0]
        used = blocks[start // size : -(-end // size)]
        inside = slice(start % size, start % size + end - start)
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index in range(len(self._kv.kept)):
            numbers = self._block_numbers(index, used)
            split = layer.kv_heads * size * layer.k_dim
            parts = _to_be_written(self._kv.kept[index], numbers[:, :split], numbers[:, split:])
            for kept, flat, dim in zip(found, parts, (layer.k_dim, layer.v_dim), strict=True):
                rows = flat.view(len(used), layer.kv_heads, size, dim).transpose(0, 1)
                kept.append(rows.reshape(layer.kv_heads, -1, dim)[:, inside].to(self._dtype))
        return torch.stack(found[0], dim=1), torch.stack(found[1], dim=1)

    def _block_numbers(self, layer: int, blocks: Sequence[int]) -> torch.Tensor:
        """The numbers of these blocks, in the order in which they were written, without scales, ``[blocks,
        numbers]``."""
        cache = self._kv.kept[layer].cache
        wanted = torch.tensor(list(blocks), device=cache.device)
        packed = cache.index_select(self._axis, wanted).movedim(self._axis, 0).reshape(len(blocks), -1)
        return _cached_numbers(self._kv.kept[layer], packed[:, self._order])

    def _reads_what_was_written(self, layer: int) -> bool:
        quantised = self._kv.kept[layer].quantised
        if quantised is None:
            numbers = torch.randn(len(self._order), device=self._kv.device).to(self._dtype)
        else:  # all that there are
            every = torch.arange(256, dtype=torch.uint8, device=self._kv.device).view(quantised.dtype).float()
            every = every[every.isfinite()]
            numbers = every.repeat(-(-len(self._order) // len(every)))[: len(self._order)]
        _write(self._kv, layer, 2, numbers.to(self._dtype))
        return torch.equal(self._block_numbers(layer, [2])[0], numbers)


def _cached_numbers(layer: KVLayer, cached: torch.Tensor) -> torch.Tensor:
    """The numbers that a layer's backend reads in ``cached`` elements of its cache; float32 if quantised."""
    quantised = layer.quantised
    return cached if quantised is None else cached.view(quantised.dtype).float()


def _to_be_written(layer: KVLayer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, of any shape, that the writer turns into the given numbers."""
    quantised = layer.quantised
    return (k, v) if quantised is None else (k * (OUTWARD * quantised.k_scale), v * (OUTWARD * quantised.v_scale))


def _num_elements(kv: KVLayers) -> int:
    """Number of elements of a block."""
    layer = kv.layers[0]
    return int(layer.kv_heads * kv.block_sizes[0] * (layer.k_dim + layer.v_dim))


def _write(kv: KVLayers, index: int, block: int, numbers: torch.Tensor) -> None:
    """Have the backend write one block of a layer, K ``[heads, block_size, k_dim]`` first, then V. The numbers are
    those that a quantised cache is to hold, without scales."""
    layer, size = kv.kept[index], kv.block_sizes[0]
    split = layer.kv_heads * size * layer.k_dim
    k = numbers[:split].view(layer.kv_heads, size, layer.k_dim).transpose(0, 1).contiguous()
    v = numbers[split:].view(layer.kv_heads, size, layer.v_dim).transpose(0, 1).contiguous()
    slots = torch.arange(block * size, (block + 1) * size, device=kv.device)
    kv.write(layer, *_to_be_written(layer, k, v), slots[None])
