"""The Triton kernel that moves KV between entries and blocks. Without Triton, this module cannot be imported."""

import triton
import triton.language as tl

from kvmosaic.core.int8 import GROUP, HALF_SCALE, LARGEST, SCALE, SMALLEST_ROW

_MOST = tl.constexpr(float(LARGEST))
_SMALLEST = tl.constexpr(SMALLEST_ROW)
_HALF_SCALE = tl.constexpr(HALF_SCALE)
_GROUP = tl.constexpr(GROUP)
_SCALE_BYTES = tl.constexpr(SCALE.itemsize)


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
    K_GROUPS: tl.constexpr,
    V_GROUPS: tl.constexpr,
    PADDED_TO: tl.constexpr,
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
            K_GROUPS,
            V_GROUPS,
            PADDED_TO,
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
    K_GROUPS: tl.constexpr,
    V_GROUPS: tl.constexpr,
    PADDED_TO: tl.constexpr,
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
    # Scales of a token; all have as many places as the layer keeps tokens, padded.
    SCALES: tl.constexpr = K_GROUPS + V_GROUPS if INT8 else 0
    layer_elements = _layer_elements(tokens, K_DIM + V_DIM, SCALES, PADDED_TO)
    if WINDOWED > 0:
        # In layers that keep only a tail, rows are counted from the first token of the tail.
        tail = tl.minimum(tokens, TAIL)
        tail_elements = _layer_elements(tail, K_DIM + V_DIM, SCALES, PADDED_TO)
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
    places = _scale_places(kept, PADDED_TO)
    for head in range(HEADS):
        k_rows = entry + rows[:, None] * K_DIM
        v_rows = entry + kept * K_DIM + rows[:, None] * V_DIM
        slot = slots[:, None] + head * stride_head
        if INT8:
            k_scales = (entry + kept * (K_DIM + V_DIM)).to(tl.pointer_type(tl.bfloat16)) + rows
            v_scales = k_scales + K_GROUPS * places
        else:
            k_scales = entry
            v_scales = entry
        if not INTO_CACHE and INT8:
            NARROW: tl.constexpr = WIDEST if WIDEST < _GROUP else _GROUP
            _quantise(slot, k_rows, k_scales, places, live, K_DIM, K_GROUPS, NARROW, DTYPE)
            _quantise(slot + K_DIM, v_rows, v_scales, places, live, V_DIM, V_GROUPS, NARROW, DTYPE)
        else:
            if PAIRS > 0:
                turned_rows = v_rows if V_TURNS else k_rows
                turned_slot = slot + K_DIM if V_TURNS else slot
                turned_scales = v_scales if V_TURNS else k_scales
                one = START + pair * STEP
                two = one + APART
                LAST: tl.constexpr = START + (PAIRS - 1) * STEP
                inside = live[:, None] & (pair < PAIRS)[None, :]
                a = _load(turned_rows, one, turned_scales, places, live, inside, START, LAST, INT8).to(tl.float32)
                b = _load(
                    turned_rows, two, turned_scales, places, live, inside, START + APART, LAST + APART, INT8
                ).to(tl.float32)
                tl.store(turned_slot + one[None, :], (a * cos - b * sin).to(DTYPE), mask=inside)
                tl.store(turned_slot + two[None, :], (b * cos + a * sin).to(DTYPE), mask=inside)
            still = (column < START) | (column >= START + 2 * PAIRS)
            if V_TURNS or K_DIM > 2 * PAIRS:
                k_still = live[:, None] & ((column < K_DIM) & (still | V_TURNS))[None, :]
                _copy(k_rows, column, k_scales, places, slot, live, k_still, K_DIM, INTO_CACHE, INT8, DTYPE)
            if not V_TURNS or V_DIM > 2 * PAIRS:
                v_still = live[:, None] & ((column < V_DIM) & (still | (not V_TURNS)))[None, :]
                _copy(v_rows, column, v_scales, places, slot + K_DIM, live, v_still, V_DIM, INTO_CACHE, INT8, DTYPE)
        entry += head_elements


@triton.jit
def _layer_elements(kept, WIDTH: tl.constexpr, SCALES: tl.constexpr, PADDED_TO: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a layer that keeps ``kept`` tokens, as ``KVFormat`` has them."""
    elements = kept * WIDTH
    if SCALES > 0:
        elements += _scale_places(kept, PADDED_TO) * (SCALES * _SCALE_BYTES)
    return elements


@triton.jit
def _scale_places(kept, PADDED_TO: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.cdiv(kept, PADDED_TO) * PADDED_TO


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    rows,
    column,
    scales,
    places,
    live,
    mask,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    INT8: tl.constexpr,
):
    """Some columns of an entry's rows as they are used, from ``FIRST`` to ``LAST``; those in 8 bits in single
    precision."""
    values = tl.load(rows + column[None, :], mask=mask)
    if INT8:
        # Each scale is read once for all columns of its group, because entries may be at the other end of a slow bus.
        group = column // _GROUP
        scale = _scale(scales, places, FIRST // _GROUP, live)
        for later in tl.static_range(FIRST // _GROUP + 1, LAST // _GROUP + 1):
            scale = tl.where((group == later)[None, :], _scale(scales, places, later, live), scale)
        values = values.to(tl.float32) * scale
    return values


@triton.jit
def _scale(scales, places, GROUP: tl.constexpr, live):  # type: ignore[no-untyped-def]
    """Scales of one group, ``[TILE, 1]``."""
    return tl.load(scales + GROUP * places, mask=live, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    rows,
    column,
    scales,
    places,
    slots,
    live,
    mask,
    DIM: tl.constexpr,
    INTO_CACHE: tl.constexpr,
    INT8: tl.constexpr,
    DTYPE: tl.constexpr,
):
    if INTO_CACHE:
        values = _load(rows, column, scales, places, live, mask, 0, DIM - 1, INT8)
        tl.store(slots + column[None, :], values.to(DTYPE), mask=mask)
    else:
        tl.store(rows + column[None, :], tl.load(slots + column[None, :], mask=mask), mask=mask)


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    slots,
    rows,
    scales,
    places,
    live,
    DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    NARROW: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``core.int8.quantised`` of whole rows of the cache, into an entry. ``NARROW``: columns of a group, padded."""
    for group in tl.static_range(GROUPS):
        column = group * _GROUP + tl.arange(0, NARROW)
        mask = live[:, None] & (column < DIM)[None, :]
        _quantise_group(slots + column[None, :], rows + column[None, :], scales + group * places, live, mask, DTYPE)


@triton.jit
def _quantise_group(slots, rows, scales, live, mask, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One group of columns of rows."""
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
