"""The Triton kernel that moves KV between entries and blocks. Without Triton, this module cannot be imported."""

import triton
import triton.language as tl

from kvmosaic.core.int8 import HALF_SCALE, LARGEST, SCALE, SMALLEST_ROW, TOGETHER

_MOST = tl.constexpr(float(LARGEST))
_SMALLEST = tl.constexpr(SMALLEST_ROW)
_HALF_SCALE = tl.constexpr(HALF_SCALE)
_TOGETHER = tl.constexpr(TOGETHER)
_SCALE_BYTES = tl.constexpr(2 * SCALE.itemsize)
"""Bytes of a token's scales, of K and of V."""


# These differ from request to request. Specialized on their divisibility, the kernel would be recompiled often.
@triton.jit(
    do_not_specialize=["num_tiles", "first_layer", "work", "first"], do_not_specialize_on_alignment=["blocks"]
)
def move_tiles(  # type: ignore[no-untyped-def]
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
    V_TURNS: tl.constexpr,
    START: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    INTO_CACHE: tl.constexpr,
    INT8: tl.constexpr,
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
            V_TURNS,
            START,
            STEP,
            APART,
            INTO_CACHE,
            INT8,
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
    V_TURNS: tl.constexpr,
    START: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    INTO_CACHE: tl.constexpr,
    INT8: tl.constexpr,
    DTYPE: tl.constexpr,
    TABLE_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    # Entries and caches are aligned to 16 bytes. With this hint, loads are as wide as the hardware allows.
    entry = tl.multiple_of(tl.load(tile).to(tl.pointer_type(tl.int8 if INT8 else DTYPE)), 16)
    tokens = tl.load(tile + 1)
    rows = tl.load(tile + 2) + tl.arange(0, TILE)
    old = tl.load(tile + 3) + tl.arange(0, TILE)
    new = tl.load(tile + 4) + tl.arange(0, TILE)
    live = (rows < tokens) & (new >= first)
    block = tl.load(blocks + new // BLOCK, mask=live, other=0)
    cache = tl.multiple_of(tl.load(cache_addresses + layer).to(tl.pointer_type(DTYPE)), 16)
    slots = cache + (block * stride_block + (new % BLOCK) * stride_token)
    layer_elements = _layer_elements(tokens, K_DIM, V_DIM, INT8)
    if WINDOWED > 0:
        # In layers that keep only a tail, rows are counted from the first token of the tail.
        tail = tl.minimum(tokens, TAIL)
        tail_elements = _layer_elements(tail, K_DIM, V_DIM, INT8)
        windowed_before = tl.load(windowed + LAYERS + layer)
        entry += (layer - windowed_before) * layer_elements + windowed_before * tail_elements
        head_elements = (LAYERS - WINDOWED) * layer_elements + WINDOWED * tail_elements
        kept = tl.where(tl.load(windowed + layer) != 0, tail, tokens)
        rows -= tokens - kept
        live &= rows >= 0
    else:
        entry += layer * layer_elements
        head_elements = LAYERS * layer_elements
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
        v_rows = entry + kept * K_DIM + rows[:, None] * V_DIM
        slot = slots[:, None] + head * stride_head
        if INT8:
            k_scales = (entry + kept * (K_DIM + V_DIM)).to(tl.pointer_type(tl.bfloat16)) + rows
            v_scales = k_scales + _scale_places(kept)
        else:
            k_scales = entry
            v_scales = entry
        if not INTO_CACHE and INT8:
            _quantise(slot + column[None, :], k_rows + column[None, :], k_scales, live, column < K_DIM, DTYPE)
            _quantise(slot + K_DIM + column[None, :], v_rows + column[None, :], v_scales, live, column < V_DIM, DTYPE)
        else:
            if PAIRS > 0:
                turned_rows = v_rows if V_TURNS else k_rows
                turned_slot = slot + K_DIM if V_TURNS else slot
                turned_scales = v_scales if V_TURNS else k_scales
                one = START + pair * STEP
                two = one + APART
                inside = live[:, None] & (pair < PAIRS)[None, :]
                a = _load(turned_rows + one[None, :], turned_scales, live, inside, INT8).to(tl.float32)
                b = _load(turned_rows + two[None, :], turned_scales, live, inside, INT8).to(tl.float32)
                tl.store(turned_slot + one[None, :], (a * cos - b * sin).to(DTYPE), mask=inside)
                tl.store(turned_slot + two[None, :], (b * cos + a * sin).to(DTYPE), mask=inside)
            still = (column < START) | (column >= START + 2 * PAIRS)
            if V_TURNS or K_DIM > 2 * PAIRS:
                k_still = live[:, None] & ((column < K_DIM) & (still | V_TURNS))[None, :]
                k_slot = slot + column[None, :]
                _copy(k_rows + column[None, :], k_scales, k_slot, live, k_still, INTO_CACHE, INT8, DTYPE)
            if not V_TURNS or V_DIM > 2 * PAIRS:
                v_still = live[:, None] & ((column < V_DIM) & (still | (not V_TURNS)))[None, :]
                v_slot = slot + (K_DIM + column[None, :])
                _copy(v_rows + column[None, :], v_scales, v_slot, live, v_still, INTO_CACHE, INT8, DTYPE)
        entry += head_elements


@triton.jit
def _layer_elements(kept, K_DIM: tl.constexpr, V_DIM: tl.constexpr, INT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a layer that keeps ``kept`` tokens, as ``KVFormat`` has them."""
    elements = kept * (K_DIM + V_DIM)
    if INT8:
        elements += _scale_places(kept) * _SCALE_BYTES
    return elements


@triton.jit
def _scale_places(kept):  # type: ignore[no-untyped-def]
    return tl.cdiv(kept, _TOGETHER) * _TOGETHER


@triton.jit
def _load(rows, scales, live, mask, INT8: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of an entry as they are used; those in 8 bits in single precision."""
    values = tl.load(rows, mask=mask)
    if INT8:
        values = values.to(tl.float32) * tl.load(scales, mask=live, other=0.0).to(tl.float32)[:, None]
    return values


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    rows, scales, slots, live, mask, INTO_CACHE: tl.constexpr, INT8: tl.constexpr, DTYPE: tl.constexpr
):
    if INTO_CACHE:
        tl.store(slots, _load(rows, scales, live, mask, INT8).to(DTYPE), mask=mask)
    else:
        tl.store(rows, tl.load(slots, mask=mask), mask=mask)


@triton.jit
def _quantise(slots, rows, scales, live, inside, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``core.int8.quantised`` of whole rows of the cache, into an entry."""
    mask = live[:, None] & inside[None, :]
    values = tl.load(slots, mask=mask, other=0.0).to(tl.float32)
    sizes = tl.abs(values)
    largest = tl.max(sizes, axis=1)
    largest = tl.where(largest < _SMALLEST, 0.0, largest)
    # A maximum may ignore NaNs.
    is_finite = tl.min((sizes < float("inf")).to(tl.int32), axis=1) != 0
    largest = tl.where(is_finite, largest, float("inf"))
    # Rounded to bfloat16 by hand: GPUs round to the nearest number, Triton's interpreter does not.
    bits = tl.div_rn(largest, _MOST).to(tl.int32, bitcast=True)
    scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    is_usable = is_finite & (scale > 0)
    if tl.float16 == DTYPE:
        scale = tl.where(is_usable, tl.minimum(scale, _HALF_SCALE), scale)
    inverse = tl.div_rn(1.0, tl.where(is_usable, scale, 1.0))
    numbers = tl.floor(values * inverse[:, None] + 0.5)
    numbers = tl.minimum(tl.maximum(numbers, -_MOST), _MOST)
    tl.store(rows, tl.where(is_usable[:, None], numbers, 0.0).to(tl.int8), mask=mask)
    tl.store(scales, scale.to(tl.bfloat16), mask=live)
