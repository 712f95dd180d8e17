"""Attention of any tokens of paged sequences over everything at or before their own positions.

Backends take runs of consecutive tokens and read a sequence's whole KV for each run. Here tokens share a tile however
far apart they are, and every tile reads the KV once. Single tokens cost hardly more than a run. If there are too few
tiles to keep a GPU busy, several programs share the keys of a tile, and their results are combined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # only the torch reference is available, and the kernel is not used
    triton = None

ROWS = 128
"""Number of rows of a tile: tokens times the query heads that share a KV head."""
RANGE_KEYS, STEP = 512, 128
"""Number of keys up to which a tile is never split, and the alignment of key ranges."""


class Asking(NamedTuple):
    """The query tokens of one paged sequence."""

    positions: np.ndarray
    """Positions of the tokens, ``[tokens]``, ascending."""
    blocks: Sequence[int]
    """Blocks of the sequence; they cover all of ``positions``."""


@dataclass(frozen=True, eq=False)
class Queries:
    """The query tokens of a pass, in a form that all layers share."""

    positions: torch.Tensor
    """``[tokens]`` int32, for all sequences."""
    key_ranges: torch.Tensor
    """``[ranges, 6]`` int32: first token of the tile, its end, its sequence, first key to read, end of the keys, and
    the slot for the partial result, or -1 if the tile has no other ranges. The longest ranges come first."""
    split: torch.Tensor
    """``[tiles, 4]`` int32, for the tiles with several ranges: first token, end, first slot, end of the slots."""
    slots: int
    blocks: torch.Tensor
    """``[sequences, blocks]`` int32."""
    group: int
    """Query heads that share a KV head."""

    @classmethod
    def of(cls, sequences: Sequence[Asking], group: int, device: torch.device, at_once: int) -> "Queries":
        """Divide the tokens of the sequences into tiles. If there are fewer tiles than ``at_once``, divide these into
        about that many key ranges of equal size."""
        size = ROWS // group
        assert size, f"{group} query heads share a KV head; at most {ROWS} may"
        found, first = [], 0
        for index, (positions, _) in enumerate(sequences):
            begins = np.arange(0, len(positions), size)
            ends = np.minimum(begins + size, len(positions))
            keys = positions[ends - 1] + 1
            found.append(np.stack([first + begins, first + ends, np.full_like(begins, index), keys], axis=1))
            first += len(positions)
        key_ranges, split = _cut(np.concatenate(found), at_once)
        table = np.zeros((len(sequences), max(len(blocks) for _, blocks in sequences)), dtype=np.int32)
        for index, (_, blocks) in enumerate(sequences):
            table[index, : len(blocks)] = blocks
        positions = np.concatenate([positions for positions, _ in sequences])
        return cls(
            _sent(positions, device),
            _sent(key_ranges, device),
            _sent(split, device),
            int(split[-1, 3]) if len(split) else 0,
            _sent(table, device),
            group,
        )


def _cut(tiles: np.ndarray, at_once: int) -> tuple[np.ndarray, np.ndarray]:
    """``key_ranges`` and ``split`` for ``tiles`` ``[tiles, 4]``: first token, end, sequence, number of keys."""
    keys = tiles[:, 3]
    enough = keys.max() if len(tiles) >= at_once else keys.sum() // at_once
    most = -(-max(RANGE_KEYS, int(enough)) // STEP) * STEP
    counts = -(-keys // most)
    slots = np.where(counts > 1, counts, 0)
    ends = slots.cumsum()
    split = np.stack([tiles[:, 0], tiles[:, 1], ends - slots, ends], axis=1)[counts > 1]
    tile = np.repeat(np.arange(len(tiles)), counts)
    place = np.arange(len(tile)) - (counts.cumsum() - counts)[tile]  # index among the ranges of its tile
    width = (-(-keys // (counts * STEP)) * STEP)[tile]
    first, end = place * width, np.minimum((place + 1) * width, keys[tile])
    slot = np.where(counts[tile] > 1, (ends - slots)[tile] + place, -1)
    key_ranges = np.stack([*tiles[tile, :3].T, first, end, slot], axis=1)
    return key_ranges[np.argsort(first - end, kind="stable")], split


def key_ranges_at_once(device: torch.device, kv_heads: int) -> int:
    """Number of key ranges that keep a GPU busy. Each of its multiprocessors computes one range of one KV head."""
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // kv_heads)


def _sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def sparse_attention(
    q: torch.Tensor, cache: torch.Tensor, queries: Queries, scale: float, window: int | None, out: torch.Tensor
) -> None:
    """Attention of ``q`` ``[tokens, heads, k_dim]`` into ``out`` ``[tokens, heads, v_dim]``. ``cache``
    ``[blocks, kv_heads, block_size, k_dim + v_dim]`` has K, then V, including those of the query tokens. Each token
    sees the last ``window`` positions up to its own, or all. Results are deterministic: the order of operations is
    fixed."""
    tokens, heads, k_dim = q.shape
    v_dim = out.shape[2]
    assert cache.shape[1] * queries.group == heads
    assert cache.shape[3] == k_dim + v_dim
    assert cache.stride(3) == q.stride(2) == out.stride(2) == 1
    assert len(queries.positions) == tokens
    # The K and V that a program holds at a time have to fit into shared memory, several times if they are prefetched.
    row_bytes = triton.next_power_of_2(max(k_dim, v_dim)) * q.element_size()
    keys, stages = (STEP, 3) if row_bytes <= 256 else (32, 2) if row_bytes <= 512 else (16, 1)
    kv_heads, slots = cache.shape[1], queries.slots
    v_padded = triton.next_power_of_2(v_dim)
    partial = torch.empty(slots, kv_heads, ROWS, v_padded, device=q.device)  # sums of weighted values
    sums = torch.empty(slots, kv_heads, 2, ROWS, device=q.device)  # sums of weights, and the highest scores
    _attend[(kv_heads, len(queries.key_ranges))](
        q,
        cache,
        out,
        partial,
        sums,
        queries.positions,
        queries.key_ranges,
        queries.blocks,
        scale * 1.4426950408889634,  # the kernel uses powers of two
        *q.stride()[:2],
        *cache.stride()[:3],
        *out.stride()[:2],
        queries.blocks.stride(0),
        GROUP=queries.group,
        ROWS=ROWS,
        KEYS=keys,
        BLOCK=cache.shape[2],
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_PADDED=triton.next_power_of_2(k_dim),
        V_PADDED=v_padded,
        WINDOW=window or 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8,
        num_stages=stages,
    )
    if slots:
        _join[(kv_heads, len(queries.split))](
            partial, sums, out, queries.split, *out.stride()[:2], queries.group, ROWS, v_dim, v_padded, num_warps=8
        )


def sparse_attention_reference(
    q: torch.Tensor, cache: torch.Tensor, queries: Queries, scale: float, window: int | None, out: torch.Tensor
) -> None:
    """:func:`sparse_attention` in torch operations, token by token."""
    k_dim = q.shape[2]
    for first, end, sequence, begin, *_ in queries.key_ranges.tolist():
        for token in range(first, end) if begin == 0 else ():
            position = int(queries.positions[token])
            seen = torch.arange(0 if window is None else max(0, position + 1 - window), position + 1)
            block = queries.blocks[sequence].cpu()[seen // cache.shape[2]].long()
            kv = cache[block, :, seen % cache.shape[2]].transpose(0, 1)  # [kv_heads, seen, k_dim + v_dim]
            asking = q[token].view(len(kv), queries.group, k_dim)
            weights = torch.softmax(asking.to(kv.dtype) @ kv[..., :k_dim].transpose(1, 2) * scale, dim=-1)
            out[token] = (weights @ kv[..., k_dim:]).view(out.shape[1:]).to(out.dtype)


if triton is not None:
    # The table is as wide as the longest sequence. Specialized on that width, the kernel would be recompiled.
    @triton.jit(do_not_specialize=["stride_blocks"])
    def _attend(  # type: ignore[no-untyped-def]
        q,
        cache,
        out,
        partial,
        sums,
        positions,
        key_ranges,
        blocks,
        scale,
        stride_q_token,
        stride_q_head,
        stride_block,
        stride_head,
        stride_slot,
        stride_out_token,
        stride_out_head,
        stride_blocks,
        GROUP: tl.constexpr,
        ROWS: tl.constexpr,
        KEYS: tl.constexpr,
        BLOCK: tl.constexpr,
        K_DIM: tl.constexpr,
        V_DIM: tl.constexpr,
        K_PADDED: tl.constexpr,
        V_PADDED: tl.constexpr,
        WINDOW: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        head = tl.program_id(0)
        mine = key_ranges + tl.program_id(1) * 6
        first, end = tl.load(mine), tl.load(mine + 1)
        blocks += tl.load(mine + 2) * stride_blocks
        first_key, end_key, slot = tl.load(mine + 3), tl.load(mine + 4), tl.load(mine + 5)
        row = tl.arange(0, ROWS)
        token = first + row // GROUP
        live = token < end
        # Positions ascend, so the first and the last one bound the keys that the tile sees.
        lowest, highest = tl.load(positions + first), tl.load(positions + end - 1)
        position = tl.where(live, tl.load(positions + token, mask=live, other=0), highest)
        q_head = head * GROUP + row % GROUP
        k_column, v_column = tl.arange(0, K_PADDED), tl.arange(0, V_PADDED)
        asking = tl.load(
            q + (token.to(tl.int64) * stride_q_token + q_head * stride_q_head)[:, None] + k_column[None, :],
            mask=live[:, None] & (k_column < K_DIM)[None, :],
            other=0.0,
        )
        cache += head * stride_head
        most = tl.full([ROWS], -1e30, tl.float32)  # finite, because a row may see none of the first keys
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, V_PADDED], tl.float32)

        # First the keys that all rows see, then those that only some see. With a window, all count as the latter.
        begin = tl.maximum(tl.maximum(lowest - WINDOW + 1, 0) // KEYS * KEYS, first_key) if WINDOW > 0 else first_key
        common = begin if WINDOW > 0 else tl.minimum((lowest + 1) // KEYS * KEYS, end_key)
        for start in range(begin, common, KEYS):
            most, total, result = _look(
                start, most, total, result, asking, cache, blocks, position, highest, scale,
                stride_block, stride_slot, KEYS, BLOCK, K_DIM, V_DIM, K_PADDED, V_PADDED, WINDOW, PRECISION, False,
            )  # fmt: skip
        for start in range(tl.maximum(common, begin), end_key, KEYS):
            most, total, result = _look(
                start, most, total, result, asking, cache, blocks, position, highest, scale,
                stride_block, stride_slot, KEYS, BLOCK, K_DIM, V_DIM, K_PADDED, V_PADDED, WINDOW, PRECISION, True,
            )  # fmt: skip
        if slot >= 0:
            slot = slot * tl.num_programs(0) + head
            tl.store(partial + (slot * ROWS + row)[:, None] * V_PADDED + v_column[None, :], result)
            tl.store(sums + slot * 2 * ROWS + row, total)
            tl.store(sums + (slot * 2 + 1) * ROWS + row, most)
        else:
            place = out + (token.to(tl.int64) * stride_out_token + q_head * stride_out_head)[:, None]
            tl.store(
                place + v_column[None, :],
                (result / total[:, None]).to(out.dtype.element_ty),
                mask=live[:, None] & (v_column < V_DIM)[None, :],
            )

    @triton.jit
    def _join(  # type: ignore[no-untyped-def]
        partial,
        sums,
        out,
        tiles,
        stride_out_token,
        stride_out_head,
        GROUP: tl.constexpr,
        ROWS: tl.constexpr,
        V_DIM: tl.constexpr,
        V_PADDED: tl.constexpr,
    ):
        """Combine the results of a tile's key ranges."""
        head = tl.program_id(0)
        tile = tiles + tl.program_id(1) * 4
        first, end = tl.load(tile), tl.load(tile + 1)
        row, v_column = tl.arange(0, ROWS), tl.arange(0, V_PADDED)
        most = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, V_PADDED], tl.float32)
        for each in range(tl.load(tile + 2), tl.load(tile + 3)):
            slot = each * tl.num_programs(0) + head
            their_most = tl.load(sums + (slot * 2 + 1) * ROWS + row)
            higher = tl.maximum(most, their_most)
            mine, other = tl.exp2(most - higher), tl.exp2(their_most - higher)
            values = tl.load(partial + (slot * ROWS + row)[:, None] * V_PADDED + v_column[None, :])
            result = result * mine[:, None] + values * other[:, None]
            total = total * mine + tl.load(sums + slot * 2 * ROWS + row) * other
            most = higher
        token = first + row // GROUP
        place = (
            out + (token.to(tl.int64) * stride_out_token + (head * GROUP + row % GROUP) * stride_out_head)[:, None]
        )
        tl.store(
            place + v_column[None, :],
            (result / total[:, None]).to(out.dtype.element_ty),
            mask=(token < end)[:, None] & (v_column < V_DIM)[None, :],
        )

    @triton.jit
    def _look(  # type: ignore[no-untyped-def]
        start,
        most,
        total,
        result,
        asking,
        cache,
        blocks,
        position,
        highest,
        scale,
        stride_block,
        stride_slot,
        KEYS: tl.constexpr,
        BLOCK: tl.constexpr,
        K_DIM: tl.constexpr,
        V_DIM: tl.constexpr,
        K_PADDED: tl.constexpr,
        V_PADDED: tl.constexpr,
        WINDOW: tl.constexpr,
        PRECISION: tl.constexpr,
        MASKED: tl.constexpr,
    ):
        """Process the next keys and values. ``MASKED``: not all rows see all of them."""
        key = start + tl.arange(0, KEYS)
        k_column, v_column = tl.arange(0, K_PADDED)[:, None], tl.arange(0, V_PADDED)[None, :]
        inside = key <= highest
        block = tl.load(blocks + key // BLOCK, mask=inside, other=0) if MASKED else tl.load(blocks + key // BLOCK)
        slot = cache + block.to(tl.int64) * stride_block + (key % BLOCK) * stride_slot
        k_place, v_place = slot[None, :] + k_column, slot[:, None] + K_DIM + v_column
        if MASKED or K_PADDED > K_DIM:
            k = tl.load(k_place, mask=inside[None, :] & (k_column < K_DIM), other=0.0)
        else:
            k = tl.load(k_place)
        score = tl.dot(asking, k, input_precision=PRECISION) * scale
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= key[None, :] > position[:, None] - WINDOW
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(most - higher)
        if MASKED or V_PADDED > V_DIM:
            v = tl.load(v_place, mask=inside[:, None] & (v_column < V_DIM), other=0.0)
        else:
            v = tl.load(v_place)
        result = tl.dot(weight.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)
        return higher, total * shrink + tl.sum(weight, 1), result
