"""Attention of any tokens of paged sequences over everything at or before their own positions.

Backends take runs of consecutive tokens and read a sequence's whole KV for each run. Here tokens share a tile however
far apart they are, and every tile reads the KV once. Single tokens cost hardly more than a run.

If there are too few tiles to keep a GPU busy, several programs share the keys of a tile, and their results are
combined. If tiles read each key often, all blocks are first copied to contiguous memory. Then the tensor memory
accelerator (TMA) of Hopper GPUs can bring the keys, and two programs fit on a multiprocessor: one multiplies while
the other computes weights.
"""

import torch

from kvmosaic.kernels.queries import STEP, Queries

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # only the torch reference is available, and the kernel is not used
    triton = None

FLAT_BYTES = 2**29
"""Maximum bytes of blocks that are copied to contiguous memory."""


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
    k_padded, v_padded = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    row_bytes = max(k_padded, v_padded) * q.element_size()
    is_even = (k_padded, v_padded) == (k_dim, v_dim) and row_bytes <= 256 and q.element_size() == 2
    flat = queries.flat if window is None and is_even else None
    if flat is not None and len(flat.blocks) * cache[0].numel() * cache.element_size() <= FLAT_BYTES:
        tiles, keys, stages, warps = flat.tiles, 64, 3, 4
        rows = cache.transpose(1, 2).index_select(0, flat.blocks).flatten(0, 1)  # [keys, kv_heads, k_dim + v_dim]
        keys_at = TensorDescriptor.from_tensor(rows.flatten(1), [keys, k_dim])
        values_at = TensorDescriptor.from_tensor(rows.flatten(1), [keys, v_dim])
        cache = rows.unflatten(0, (-1, cache.shape[2])).transpose(1, 2)
    else:
        tiles, keys_at, values_at = queries.tiles, None, None
        keys, stages, warps = (STEP, 3, 8) if row_bytes <= 256 else (32, 2, 8) if row_bytes <= 512 else (16, 1, 8)
    kv_heads = cache.shape[1]
    # Of key ranges: the sums of weighted values; the sums of weights, and the highest scores.
    partial = torch.empty(tiles.slots, kv_heads, tiles.rows, v_padded, device=q.device)
    sums = torch.empty(tiles.slots, kv_heads, 2, tiles.rows, device=q.device)
    _attend[(kv_heads, len(tiles.key_ranges))](
        q,
        cache,
        keys_at,
        values_at,
        out,
        partial,
        sums,
        queries.positions,
        tiles.key_ranges,
        tiles.blocks,
        scale * 1.4426950408889634,  # the kernel uses powers of two
        *q.stride()[:2],
        *cache.stride()[:3],
        *out.stride()[:2],
        tiles.blocks.stride(0),
        GROUP=queries.group,
        ROWS=tiles.rows,
        KEYS=keys,
        BLOCK=cache.shape[2],
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_PADDED=k_padded,
        V_PADDED=v_padded,
        WINDOW=window or 0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
    )
    if tiles.slots:
        _join[(kv_heads, len(tiles.split))](
            partial,
            sums,
            out,
            tiles.split,
            *out.stride()[:2],
            queries.group,
            tiles.rows,
            v_dim,
            v_padded,
            num_warps=8,
        )


def sparse_attention_reference(
    q: torch.Tensor, cache: torch.Tensor, queries: Queries, scale: float, window: int | None, out: torch.Tensor
) -> None:
    """:func:`sparse_attention` in torch operations, token by token."""
    k_dim = q.shape[2]
    for first, end, sequence, begin, *_ in queries.tiles.key_ranges.tolist():
        for token in range(first, end) if begin == 0 else ():
            position = int(queries.positions[token])
            seen = torch.arange(0 if window is None else max(0, position + 1 - window), position + 1)
            block = queries.tiles.blocks[sequence].cpu()[seen // cache.shape[2]].long()
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
        keys_at,
        values_at,
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
        """``keys_at``, ``values_at``: descriptors of the cache if its blocks are in order, otherwise ``None``."""
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
        if keys_at is not None:
            copy, column = tl.load(blocks) * BLOCK, head * (K_DIM + V_DIM)
            for start in range(begin, common, KEYS):
                score = tl.dot(asking, keys_at.load([copy + start, column]).T, input_precision=PRECISION)
                weight, most, shrink = _weigh(score, most, scale)
                v = values_at.load([copy + start, column + K_DIM])
                total = total * shrink + tl.sum(weight, 1)
                result = tl.dot(weight.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)
        else:
            for start in range(begin, common, KEYS):
                most, total, result = _look(
                    start, most, total, result, asking, cache, blocks, position, highest, scale,
                    stride_block, stride_slot, KEYS, BLOCK, K_DIM, V_DIM, K_PADDED, V_PADDED, WINDOW,
                    PRECISION, False,
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
        k_column, v_column = tl.arange(0, K_PADDED)[None, :], tl.arange(0, V_PADDED)[None, :]
        inside = key <= highest
        block = tl.load(blocks + key // BLOCK, mask=inside, other=0) if MASKED else tl.load(blocks + key // BLOCK)
        place = (cache + block.to(tl.int64) * stride_block + (key % BLOCK) * stride_slot)[:, None]
        if MASKED or K_PADDED > K_DIM:
            k = tl.load(place + k_column, mask=inside[:, None] & (k_column < K_DIM), other=0.0)
        else:
            k = tl.load(place + k_column)
        score = tl.dot(asking, k.T, input_precision=PRECISION)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= key[None, :] > position[:, None] - WINDOW
            score = tl.where(seen, score, float("-inf"))
        weight, higher, shrink = _weigh(score, most, scale)
        if MASKED or V_PADDED > V_DIM:
            v = tl.load(place + K_DIM + v_column, mask=inside[:, None] & (v_column < V_DIM), other=0.0)
        else:
            v = tl.load(place + K_DIM + v_column)
        result = tl.dot(weight.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)
        return higher, total * shrink + tl.sum(weight, 1), result

    @triton.jit
    def _weigh(score, most, scale):  # type: ignore[no-untyped-def]
        """Weights of keys by their ``score``, relative to the highest score so far, that score, and the factor for
        all weights before. Scaling behind the maximum costs one operation for each score instead of two."""
        higher = tl.maximum(most, tl.max(score, 1) * scale)
        return tl.exp2(score * scale - higher[:, None]), higher, tl.exp2(most - higher)
