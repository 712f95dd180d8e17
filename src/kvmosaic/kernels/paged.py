"""Copies between entries and an engine's paged KV cache, for all layers and all chunks of a request in one launch.

``scatter`` copies entries into blocks and turns their keys on the way. ``gather`` copies blocks into entries. Each is
a Triton kernel with an equivalent torch reference that runs on any device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kvmosaic.core.rotation import CosSin, RotaryColumns, rotate_, rotation_between
from kvmosaic.core.window import WHOLE, WindowTails

try:
    import triton
    import triton.language as tl
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
    """``[heads, numbers]`` like the data of an entry, contiguous, in device memory or pinned host memory."""
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
    """The columns of K that turn, in all layers with a table."""

    def __post_init__(self) -> None:
        assert len({layer.stride() for layer in self.layers}) == 1
        assert all(layer.stride(-1) == 1 for layer in self.layers)
        assert len(self.tables) == len(self.layers)
        assert self.columns is None or self.columns.part == "k"
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


def gather(moves: Sequence[Move], caches: PagedCaches, blocks: Sequence[int]) -> None:
    """Copy the tokens of each move from the sequence in ``blocks`` into its ``data``: all layers, keys not turned."""
    for _ in _launch(moves, caches, blocks, 0, WHOLE, into_cache=False, groups=[range(len(caches.layers))]):
        pass


def scatter_reference(
    moves: Sequence[Move], caches: PagedCaches, blocks: Sequence[int], first: int = 0, tails: WindowTails = WHOLE
) -> None:
    """:func:`scatter` in torch operations."""
    _check(moves, caches, tails)
    for move in moves:
        for index, (layer, table) in enumerate(zip(caches.layers, caches.tables, strict=True)):
            k, v = _rows(move, caches, index, tails)
            left_out = move.tokens - k.shape[1]
            positions = torch.arange(move.new + left_out, move.new + move.tokens)
            keep = positions >= first
            rows, slots = _slots(positions[keep], caches, blocks)
            if table is not None:
                assert caches.columns is not None
                old = torch.arange(move.old + left_out, move.old + move.tokens)
                turn = rotation_between(_table_rows(table, old), _table_rows(table, positions))
                k = k.clone()
                rotate_(k, turn, caches.columns)
            layer[rows, :, slots] = torch.cat([k, v], dim=-1)[:, keep].transpose(0, 1)


def gather_reference(moves: Sequence[Move], caches: PagedCaches, blocks: Sequence[int]) -> None:
    """:func:`gather` in torch operations."""
    _check(moves, caches, WHOLE)
    for move in moves:
        rows, slots = _slots(torch.arange(move.new, move.new + move.tokens), caches, blocks)
        for index, layer in enumerate(caches.layers):
            k, v = _rows(move, caches, index, WHOLE)
            both = layer[rows, :, slots].transpose(0, 1)
            k[:], v[:] = both[..., : caches.k_dim], both[..., caches.k_dim :]


def _rows(move: Move, caches: PagedCaches, layer: int, tails: WindowTails) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer of an entry, as views ``[heads, kept tokens, dim]``."""
    begin = tails.begins(layer, move.tokens)[-1] * (caches.k_dim + caches.v_dim)
    kept, heads = tails.kept(layer, move.tokens), caches.heads
    split, end = begin + kept * caches.k_dim, begin + kept * (caches.k_dim + caches.v_dim)
    return (
        move.data[:, begin:split].view(heads, kept, caches.k_dim),
        move.data[:, split:end].view(heads, kept, caches.v_dim),
    )


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
    heads, layers = caches.heads, len(caches.layers)
    assert len(blocks) * caches.block_size >= max(move.new + move.tokens for move in moves)
    # Per tile: address of the entry, its tokens, first token of the tile, and the old and new position of that token.
    whole = np.array([(move.data.data_ptr(), move.tokens, 0, move.old, move.new) for move in moves], dtype=np.int64)
    counts = -(-whole[:, 1] // TILE)
    tiles = np.repeat(whole, counts, axis=0)
    tiles[:, 2] = (np.arange(len(tiles)) - np.repeat(counts.cumsum() - counts, counts)) * TILE
    tiles[:, 3:] += tiles[:, 2:3]
    plan = torch.from_numpy(np.concatenate([tiles.ravel(), np.array(blocks, dtype=np.int64)]))
    device = caches.layers[0].device
    if device.type == "cuda":
        plan = plan.pin_memory().to(device, non_blocking=True)
    cache, columns = caches.layers[0], caches.columns
    tables = [table for table in caches.tables if table is not None]
    pairs = columns.width // 2 if columns is not None and into_cache and tables else 0
    interleaved = columns is not None and columns.interleaved
    for group in groups:
        work = len(tiles) * len(group)
        _move_tiles[(min(work, programs or work),)](
            plan,
            len(tiles),
            group.start,
            work,
            plan[5 * len(tiles) :],
            caches.pointers[0],
            caches.pointers[1],
            _windowed(layers, tails, device),
            first,
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            HEADS=heads,
            LAYERS=layers,
            WINDOWED=len(tails.layers),
            TAIL=tails.tokens,
            BLOCK=caches.block_size,
            K_DIM=caches.k_dim,
            V_DIM=caches.v_dim,
            WIDEST=triton.next_power_of_2(max(caches.k_dim, caches.v_dim)),
            PAIRS=pairs,
            PAIRS_PADDED=triton.next_power_of_2(max(pairs, 1)),
            START=columns.start if columns is not None else 0,
            STEP=2 if interleaved else 1,
            APART=1 if interleaved else pairs,
            INTO_CACHE=into_cache,
            DTYPE=_triton_type(cache.dtype),
            TABLE_DTYPE=_triton_type(tables[0].dtype if tables else cache.dtype),
            TILE=TILE,
        )
        yield group


def _check(moves: Sequence[Move], caches: PagedCaches, tails: WindowTails) -> None:
    """Raise a ``ValueError`` if an entry does not have the shape, dtype and layout that the cache needs: the kernel
    could access memory outside the entry."""
    layers, width, dtype = len(caches.layers), caches.k_dim + caches.v_dim, caches.layers[0].dtype
    for move in moves:
        shape = (caches.heads, tails.rows(layers, move.tokens) * width)
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


if triton is not None:
    # These differ from request to request. Specialized on their divisibility, the kernel would be recompiled often.
    @triton.jit(
        do_not_specialize=["num_tiles", "first_layer", "work", "first"], do_not_specialize_on_alignment=["blocks"]
    )
    def _move_tiles(  # type: ignore[no-untyped-def]
        tiles,
        num_tiles,
        first_layer,
        work,
        blocks,
        cache_addresses,
        table_addresses,
        windowed,
        first,
        stride_block,
        stride_head,
        stride_token,
        HEADS: tl.constexpr,
        LAYERS: tl.constexpr,
        WINDOWED: tl.constexpr,
        TAIL: tl.constexpr,
        BLOCK: tl.constexpr,
        K_DIM: tl.constexpr,
        V_DIM: tl.constexpr,
        WIDEST: tl.constexpr,
        PAIRS: tl.constexpr,
        PAIRS_PADDED: tl.constexpr,
        START: tl.constexpr,
        STEP: tl.constexpr,
        APART: tl.constexpr,
        INTO_CACHE: tl.constexpr,
        DTYPE: tl.constexpr,
        TABLE_DTYPE: tl.constexpr,
        TILE: tl.constexpr,
    ):
        for index in range(tl.program_id(0), work, tl.num_programs(0)):
            _move_tile(
                tiles + index % num_tiles * 5,
                first_layer + index // num_tiles,
                blocks,
                cache_addresses,
                table_addresses,
                windowed,
                first,
                stride_block,
                stride_head,
                stride_token,
                HEADS,
                LAYERS,
                WINDOWED,
                TAIL,
                BLOCK,
                K_DIM,
                V_DIM,
                WIDEST,
                PAIRS,
                PAIRS_PADDED,
                START,
                STEP,
                APART,
                INTO_CACHE,
                DTYPE,
                TABLE_DTYPE,
                TILE,
            )

    @triton.jit
    def _move_tile(  # type: ignore[no-untyped-def]
        tile,
        layer,
        blocks,
        cache_addresses,
        table_addresses,
        windowed,
        first,
        stride_block,
        stride_head,
        stride_token,
        HEADS: tl.constexpr,
        LAYERS: tl.constexpr,
        WINDOWED: tl.constexpr,
        TAIL: tl.constexpr,
        BLOCK: tl.constexpr,
        K_DIM: tl.constexpr,
        V_DIM: tl.constexpr,
        WIDEST: tl.constexpr,
        PAIRS: tl.constexpr,
        PAIRS_PADDED: tl.constexpr,
        START: tl.constexpr,
        STEP: tl.constexpr,
        APART: tl.constexpr,
        INTO_CACHE: tl.constexpr,
        DTYPE: tl.constexpr,
        TABLE_DTYPE: tl.constexpr,
        TILE: tl.constexpr,
    ):
        # Entries and caches are aligned to 16 bytes. With this hint, loads are as wide as the hardware allows.
        entry = tl.multiple_of(tl.load(tile).to(tl.pointer_type(DTYPE)), 16)
        tokens = tl.load(tile + 1)
        rows = tl.load(tile + 2) + tl.arange(0, TILE)
        old = tl.load(tile + 3) + tl.arange(0, TILE)
        new = tl.load(tile + 4) + tl.arange(0, TILE)
        live = (rows < tokens) & (new >= first)
        block = tl.load(blocks + new // BLOCK, mask=live, other=0)
        cache = tl.multiple_of(tl.load(cache_addresses + layer).to(tl.pointer_type(DTYPE)), 16)
        slots = cache + (block * stride_block + (new % BLOCK) * stride_token)
        if WINDOWED > 0:
            # In layers that keep only a tail, rows are counted from the first token of the tail.
            tail = tl.minimum(tokens, TAIL)
            windowed_before = tl.load(windowed + LAYERS + layer)
            entry += ((layer - windowed_before) * tokens + windowed_before * tail) * (K_DIM + V_DIM)
            head_rows = (LAYERS - WINDOWED) * tokens + WINDOWED * tail
            kept = tl.where(tl.load(windowed + layer) != 0, tail, tokens)
            rows -= tokens - kept
            live &= rows >= 0
        else:
            entry += layer * tokens * (K_DIM + V_DIM)
            head_rows = LAYERS * tokens
            kept = tokens

        if PAIRS > 0:
            address = tl.load(table_addresses + layer)
            table = address.to(tl.pointer_type(TABLE_DTYPE))
            pair = tl.arange(0, PAIRS_PADDED)
            # Keys that keep their position are copied bit for bit. Fused products might not cancel exactly.
            turning = (live & (old != new))[:, None] & (pair < tl.where(address != 0, PAIRS, 0))[None, :]
            at_old = table + old[:, None] * (2 * PAIRS) + pair[None, :]
            at_new = table + new[:, None] * (2 * PAIRS) + pair[None, :]
            old_cos = tl.load(at_old, mask=turning, other=1.0).to(tl.float32)
            old_sin = tl.load(at_old + PAIRS, mask=turning, other=0.0).to(tl.float32)
            new_cos = tl.load(at_new, mask=turning, other=1.0).to(tl.float32)
            new_sin = tl.load(at_new + PAIRS, mask=turning, other=0.0).to(tl.float32)
            norm = old_cos * old_cos + old_sin * old_sin
            cos = (new_cos * old_cos + new_sin * old_sin) / norm
            sin = (new_sin * old_cos - new_cos * old_sin) / norm

        column = tl.arange(0, WIDEST)
        for head in range(HEADS):
            k_rows = entry + rows[:, None] * K_DIM
            v_rows = entry + kept * K_DIM + rows[:, None] * V_DIM + column[None, :]
            slot = slots[:, None] + head * stride_head
            if PAIRS > 0:
                one = START + pair * STEP
                two = one + APART
                inside = live[:, None] & (pair < PAIRS)[None, :]
                a = tl.load(k_rows + one[None, :], mask=inside).to(tl.float32)
                b = tl.load(k_rows + two[None, :], mask=inside).to(tl.float32)
                tl.store(slot + one[None, :], (a * cos - b * sin).to(DTYPE), mask=inside)
                tl.store(slot + two[None, :], (b * cos + a * sin).to(DTYPE), mask=inside)
            if K_DIM > 2 * PAIRS:
                still = (column < K_DIM) & ((column < START) | (column >= START + 2 * PAIRS))
                _copy(k_rows + column[None, :], slot + column[None, :], live[:, None] & still[None, :], INTO_CACHE)
            _copy(v_rows, slot + K_DIM + column[None, :], live[:, None] & (column < V_DIM)[None, :], INTO_CACHE)
            entry += head_rows * (K_DIM + V_DIM)

    @triton.jit
    def _copy(entry_side, cache_side, mask, INTO_CACHE: tl.constexpr):  # type: ignore[no-untyped-def]
        if INTO_CACHE:
            tl.store(cache_side, tl.load(entry_side, mask=mask), mask=mask)
        else:
            tl.store(entry_side, tl.load(cache_side, mask=mask), mask=mask)
