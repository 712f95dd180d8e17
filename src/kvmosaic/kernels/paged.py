"""Copies between entries and an engine's paged KV cache, for all layers and all chunks of a request in one launch.

``scatter`` copies entries into blocks and turns their keys on the way. ``gather`` copies blocks into entries. Entries
whose data is int8 hold rows in 8 bits (``core/int8.py``), which are made or read in the same pass. Each is a Triton
kernel with an equivalent torch reference that runs on any device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np
import torch

from kvmosaic.core.entry import KVFormat, LayerParts, PackedKV
from kvmosaic.core.int8 import dequantised, groups_of, padded_to, quantised
from kvmosaic.core.rotation import CosSin, RotaryColumns, rotate_, rotation_between
from kvmosaic.core.window import WHOLE, WindowTails

try:
    import triton
    import triton.language as tl

    from kvmosaic.kernels.move_tiles import move_tiles
except ImportError:  # only the torch reference is available, and the kernel is not used
    triton = None

TILE = 32
"""Number of tokens that the kernel moves at a time, in one layer."""
FEW_PROGRAMS = 32
"""Number of programs for entries in host memory: enough to saturate the bus, which is far slower than the GPU's own
memory, and few enough to leave most of the GPU to other work."""


class Move(NamedTuple):
    """An entry and its position in a paged sequence."""

    data: torch.Tensor
    """``[heads, elements]`` like the data of an entry, contiguous, in device memory or pinned host memory; in the
    cache's dtype, or int8."""
    tokens: int
    old: int
    """Position at which its first token was computed."""
    new: int
    """Position of its first token in the paged sequence."""


@dataclass(frozen=True, eq=False)
class PagedCaches:
    """The KV cache of an engine, in the form that the kernel needs."""

    layers: Sequence[torch.Tensor]
    """Per layer ``[blocks, heads, block_size, k_dim + v_dim]``: K, then V. Strides are the same in all layers, the
    last is 1."""
    k_dim: int
    tables: Sequence[torch.Tensor | None]
    """Per layer the rotary table ``[positions, width]``, cos then sin; ``None`` if the layer's keys do not turn."""
    columns: RotaryColumns | None
    """The columns of K or V that turn, in all layers with a table."""

    def __post_init__(self) -> None:
        assert len({layer.stride() for layer in self.layers}) == 1
        assert all(layer.stride(-1) == 1 for layer in self.layers)
        assert len(self.tables) == len(self.layers)
        tables = [table for table in self.tables if table is not None]
        assert len({table.dtype for table in tables}) <= 1
        assert all(self.columns and table.stride() == (self.columns.width, 1) for table in tables)

    @property
    def block_size(self) -> int:
        return self.layers[0].shape[2]

    @property
    def heads(self) -> int:
        return self.layers[0].shape[1]

    @property
    def v_dim(self) -> int:
        return self.layers[0].shape[3] - self.k_dim

    def format(self, tails: WindowTails, is_int8: bool) -> KVFormat:
        """Format of entries that keep the tokens given by ``tails``."""
        dtype = self.layers[0].dtype
        return KVFormat(len(self.layers), self.heads, self.k_dim, self.v_dim, dtype, tails, is_int8)

    @cached_property
    def pointers(self) -> torch.Tensor:
        """``[2, layers]``: addresses of the layers and of their tables, 0 for no table."""
        tables = [0 if table is None else table.data_ptr() for table in self.tables]
        addresses = [[layer.data_ptr() for layer in self.layers], tables]
        return torch.tensor(addresses, dtype=torch.int64, device=self.layers[0].device)


def scatter(
    moves: Sequence[Move], caches: PagedCaches, blocks: Sequence[int], first: int = 0, tails: WindowTails = WHOLE
) -> None:
    """Copy entries, which keep the tokens given by ``tails``, into the sequence in ``blocks``, and turn their keys.
    Positions below ``first`` are not written."""
    for _ in _launch(moves, caches, blocks, first, tails, into_cache=True, groups=[range(len(caches.layers))]):
        pass


def scatter_slowly(
    moves: Sequence[Move],
    caches: PagedCaches,
    blocks: Sequence[int],
    first: int,
    tails: WindowTails,
    groups: Sequence[range],
) -> Iterator[range]:
    """:func:`scatter` for entries in host memory, in parallel with other work. Launches one group of layers after the
    other, and yields each of ``groups`` after its launch."""
    return _launch(moves, caches, blocks, first, tails, into_cache=True, groups=groups, programs=FEW_PROGRAMS)


def gather(moves: Sequence[Move], caches: PagedCaches, blocks: Sequence[int], tails: WindowTails = WHOLE) -> None:
    """Copy the tokens of each move, those that ``tails`` keep, from the sequence in ``blocks`` into its ``data``: all
    layers, keys not turned. If that is int8, places of scales that no token has are not written."""
    for _ in _launch(moves, caches, blocks, 0, tails, into_cache=False, groups=[range(len(caches.layers))]):
        pass


def scatter_reference(
    moves: Sequence[Move], caches: PagedCaches, blocks: Sequence[int], first: int = 0, tails: WindowTails = WHOLE
) -> None:
    """:func:`scatter` in torch operations."""
    _check(moves, caches, tails)
    for move in moves:
        for index, (layer, table) in enumerate(zip(caches.layers, caches.tables, strict=True)):
            k, v, k_scales, v_scales = _parts(move, caches, index, tails)
            if k_scales is not None and v_scales is not None:
                k, v = dequantised(k, k_scales), dequantised(v, v_scales)
            left_out = move.tokens - k.shape[1]
            positions = torch.arange(move.new + left_out, move.new + move.tokens)
            keep = positions >= first
            rows, slots = _slots(positions[keep], caches, blocks)
            if table is not None:
                assert caches.columns is not None
                old = torch.arange(move.old + left_out, move.old + move.tokens)
                turn = rotation_between(_table_rows(table, old), _table_rows(table, positions))
                k, v = k.clone(), v.clone()
                rotate_(k if caches.columns.part == "k" else v, turn, caches.columns)
            layer[rows, :, slots] = torch.cat([k, v], dim=-1)[:, keep].transpose(0, 1).to(layer.dtype)


def gather_reference(
    moves: Sequence[Move], caches: PagedCaches, blocks: Sequence[int], tails: WindowTails = WHOLE
) -> None:
    """:func:`gather` in torch operations."""
    _check(moves, caches, tails)
    for move in moves:
        for index, layer in enumerate(caches.layers):
            parts = _parts(move, caches, index, tails)
            left_out = move.tokens - parts.k.shape[1]
            rows, slots = _slots(torch.arange(move.new + left_out, move.new + move.tokens), caches, blocks)
            k, v = layer[rows, :, slots].transpose(0, 1).split([caches.k_dim, caches.v_dim], dim=-1)
            if parts.k_scales is not None and parts.v_scales is not None:
                (k, k_scales), (v, v_scales) = quantised(k), quantised(v)
                parts.k_scales[:], parts.v_scales[:] = k_scales, v_scales
            parts.k[:], parts.v[:] = k, v


def _parts(move: Move, caches: PagedCaches, layer: int, tails: WindowTails) -> LayerParts:
    """One layer of an entry, as views."""
    return PackedKV(move.data, caches.format(tails, move.data.dtype == torch.int8), move.tokens).parts(layer)


def _slots(positions: torch.Tensor, caches: PagedCaches, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(blocks)[positions // caches.block_size], positions % caches.block_size


def _table_rows(table: torch.Tensor, positions: torch.Tensor) -> CosSin:
    return CosSin(*table[positions].float().chunk(2, dim=-1))


def _launch(
    moves: Sequence[Move],
    caches: PagedCaches,
    blocks: Sequence[int],
    first: int,
    tails: WindowTails,
    into_cache: bool,
    groups: Sequence[range],
    programs: int | None = None,
) -> Iterator[range]:
    """Launch the kernel over tiles of tokens times layers, once for each of ``groups``, and yield the group after its
    launch. Copies a small plan to the device and waits for nothing. ``programs``: maximum per launch."""
    if not moves:
        return
    _check(moves, caches, tails)
    assert len(blocks) * caches.block_size >= max(move.new + move.tokens for move in moves)
    device, layers = caches.layers[0].device, len(caches.layers)
    # Entries in 8 bits and others have different layouts, and need launches of their own.
    kinds = {is_int8: [move for move in moves if (move.data.dtype == torch.int8) == is_int8] for is_int8 in (0, 1)}
    plans = [(bool(is_int8), *_plan(some, blocks, device)) for is_int8, some in kinds.items() if some]
    cache, columns = caches.layers[0], caches.columns
    tables = [table for table in caches.tables if table is not None]
    pairs = columns.width // 2 if columns is not None and into_cache and tables else 0
    interleaved = columns is not None and columns.interleaved
    k_groups, v_groups = groups_of(caches.k_dim), groups_of(caches.v_dim)
    for group, (is_int8, plan, tiles) in product(groups, plans):
        work = tiles * len(group)
        move_tiles[(min(work, programs or work),)](
            plan,
            tiles,
            group.start,
            work,
            plan[5 * tiles :],
            caches.pointers[0],
            caches.pointers[1],
            _windowed(layers, tails, device),
            first,
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            HEADS=caches.heads,
            LAYERS=layers,
            WINDOWED=len(tails.layers),
            TAIL=tails.tokens,
            BLOCK=caches.block_size,
            K_DIM=caches.k_dim,
            V_DIM=caches.v_dim,
            WIDEST=triton.next_power_of_2(max(caches.k_dim, caches.v_dim)),
            PAIRS=pairs,
            PAIRS_PADDED=triton.next_power_of_2(max(pairs, 1)),
            V_TURNS=columns is not None and columns.part == "v",
            START=columns.start if columns is not None else 0,
            STEP=2 if interleaved else 1,
            APART=1 if interleaved else pairs,
            INTO_CACHE=into_cache,
            INT8=is_int8,
            K_GROUPS=k_groups,
            V_GROUPS=v_groups,
            PADDED_TO=padded_to(k_groups + v_groups),
            DTYPE=_triton_type(cache.dtype),
            TABLE_DTYPE=_triton_type(tables[0].dtype if tables else cache.dtype),
            TILE=TILE,
        )
        if is_int8 == plans[-1][0]:
            yield group


def _plan(moves: Sequence[Move], blocks: Sequence[int], device: torch.device) -> tuple[torch.Tensor, int]:
    """The kernel's input about entries and their sequence, being copied to the device, and the number of tiles."""
    # Per tile: address of the entry, its tokens, first token of the tile, and the old and new position of that token.
    whole = np.array([(move.data.data_ptr(), move.tokens, 0, move.old, move.new) for move in moves], dtype=np.int64)
    counts = -(-whole[:, 1] // TILE)
    tiles = np.repeat(whole, counts, axis=0)
    tiles[:, 2] = (np.arange(len(tiles)) - np.repeat(counts.cumsum() - counts, counts)) * TILE
    tiles[:, 3:] += tiles[:, 2:3]
    plan = torch.from_numpy(np.concatenate([tiles.ravel(), np.array(blocks, dtype=np.int64)]))
    return plan.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else plan, len(tiles)


def _check(moves: Sequence[Move], caches: PagedCaches, tails: WindowTails) -> None:
    """Raise a ``ValueError`` if an entry does not have the shape, dtype and layout that the cache needs: the kernel
    could access memory outside the entry."""
    for move in moves:
        needed = caches.format(tails, move.data.dtype == torch.int8)
        shape, dtype = (needed.heads, needed.num_elements(move.tokens)), needed.stored_dtype
        if move.data.shape != shape or move.data.dtype != dtype or not move.data.is_contiguous():
            raise ValueError(
                f"an entry of {tuple(move.data.shape)} {move.data.dtype} where {shape} {dtype} is needed"
            )


@lru_cache(maxsize=16)
def _windowed(layers: int, tails: WindowTails, device: torch.device) -> torch.Tensor:
    """``[2, layers]``: whether a layer keeps only a tail, and the number of earlier layers that do."""
    cut = [int(layer in tails.layers) for layer in range(layers)]
    return torch.tensor([cut, [0, *accumulate(cut)][:-1]], dtype=torch.int64, device=device)


def _triton_type(dtype: torch.dtype) -> Any:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
