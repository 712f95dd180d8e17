"""Rows in 8 bits: the bounds of their errors, and the places of their scales."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.entry import ChunkKV, KVFormat, PackedKV
from kvmosaic.core.int8 import LARGEST, SCALE, SMALLEST_ROW, dequantised, quantised
from kvmosaic.core.key import ChunkKey, marked
from kvmosaic.core.window import WHOLE, WindowTails

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KEY, WIDE_KEY = (ChunkKey(bytes(16), 5, "m", f"f.{numbers}") for numbers in ("int8", "int8x64"))


def rows_with_loud_groups(*shape):
    """Random rows in which some runs of columns are a hundred times as large as others, as in real models."""
    runs = -(-shape[-1] // 16)
    loudness = 10 ** (2 * torch.rand(*shape[:-1], runs)).repeat_interleave(16, dim=-1)[..., : shape[-1]]
    return torch.randn(*shape) * loudness


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 300.0, 60000.0, 1e30])
@pytest.mark.parametrize("dim", [32, 48, 64, 80, 96, 256, 512, 576])
def test_no_number_is_off_by_more_than_half_a_scale(dtype, size, dim):
    rows = rows_with_loud_groups(7, 5, dim).double()
    rows *= size / rows.abs().max()
    rows = rows.to(dtype)  # some sizes are too small for some dtypes; they become zeros
    if not rows.isfinite().all():
        pytest.skip("too large for this dtype")
    numbers, scales = quantised(rows)
    assert numbers.dtype == torch.int8
    assert numbers.abs().max() <= LARGEST
    assert scales.dtype == SCALE
    read = dequantised(numbers, scales).double()
    begins = range(0, dim, 64)
    assert scales.shape == (7, len(begins), 5)
    for group, begin in enumerate(begins):
        own, columns = scales[:, group], slice(begin, begin + 64)
        largest = rows[..., columns].double().abs().amax(-1)
        off = (read - rows.double())[..., columns].abs().amax(-1)
        half_a_scale = torch.where(own > 0, own.double() / 2, torch.inf)  # groups that are nearly 0 have no scale
        assert (off <= torch.minimum(half_a_scale * (1 + 1e-5), largest / 253)).all()
        assert (numbers[..., columns].abs().amax(-1)[own > 0] >= LARGEST - 1).all()  # all 8 bits are used


@pytest.mark.parametrize("below", range(0, 600, 8))
def test_the_largest_half_precision_numbers_stay_finite(below):
    rows = torch.tensor([[torch.finfo(torch.float16).max - below, 3.0]], dtype=torch.float16)
    read = dequantised(*quantised(rows)).to(torch.float16)
    assert read.isfinite().all()
    assert (read - rows).abs().max() <= 65504 / LARGEST


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_each_row_has_a_scale_of_its_own(seed, dim):
    chance = torch.Generator().manual_seed(seed)
    small = torch.randn(3, dim, generator=chance)
    both = torch.cat([small, 1000 * small])
    numbers, scales = quantised(both)
    alone = quantised(small)
    assert torch.equal(numbers[:3], alone[0])
    assert torch.equal(scales[:, :3], alone[1])


@given(st.integers(0, 2**32 - 1), st.integers(65, 300))
def test_each_group_has_a_scale_of_its_own(seed, dim):
    """A row of several groups equals its groups, each quantised alone."""
    rows = torch.randn(2, 3, dim, generator=torch.Generator().manual_seed(seed))
    numbers, scales = quantised(rows)
    for group, begin in enumerate(range(0, dim, 64)):
        alone, own = quantised(rows[..., begin : begin + 64])
        assert torch.equal(numbers[..., begin : begin + 64], alone)
        assert torch.equal(scales[:, group : group + 1], own)


def test_rows_of_zeros_and_of_next_to_nothing_are_zeros():
    rows = torch.zeros(3, 8)
    rows[1, 2], rows[2] = 0.9 * SMALLEST_ROW, torch.finfo(torch.float32).tiny / 8
    numbers, scales = quantised(rows)
    assert not numbers.any()
    assert not scales.any()
    assert not dequantised(numbers, scales).any()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_a_row_that_is_not_finite_never_looks_as_if_it_were(bad):
    rows = torch.randn(4, 8)
    rows[1, 3] = bad
    read = dequantised(*quantised(rows))
    assert read[1].isnan().all()
    assert read[[0, 2, 3]].isfinite().all()
    rows = torch.randn(4, 150)
    rows[1, 127] = bad
    read = dequantised(*quantised(rows))
    assert read[1, 64:128].isnan().all()
    assert read.isnan().sum() == 64


def test_rows_without_numbers():
    numbers, scales = quantised(torch.zeros(2, 3, 0))
    assert numbers.shape == (2, 3, 0)
    assert scales.shape == (2, 1, 3)
    assert not scales.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tails", [WHOLE, WindowTails((0, 2), 3), WindowTails((1,), 9), WindowTails((0, 1, 2), 1)])
@pytest.mark.parametrize("dims", [(8, 8), (32, 8), (6, 10), (5, 3), (80, 80), (130, 64), (48, 96), (512, 64)])
def test_an_entry_reads_as_its_rows_alone_would(dtype, tails, dims):
    k, v = (torch.randn(2, 3, 5, dim).to(dtype) for dim in dims)
    key = KEY if max(dims) <= 64 else WIDE_KEY
    entry = ChunkKV.from_kv(key, range(5), [], k, v, tails, "document")
    assert entry.data.dtype == torch.int8
    assert entry.nbytes == entry.format.nbytes(5) == entry.data.nbytes
    for layer in range(3):
        kept = tails.kept(layer, 5)
        for ours, rows in zip(entry.layer(layer), (k, v), strict=True):
            wanted = dequantised(*quantised(rows[:, layer, 5 - kept :])).to(dtype)
            assert ours.dtype == dtype
            assert torch.equal(ours, wanted)


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 13])
@pytest.mark.parametrize(
    ("dims", "groups", "padded_to"),
    [((64, 64), 2, 4), ((32, 48), 2, 4), ((80, 80), 4, 4), ((256, 256), 8, 4), ((512, 64), 9, 8), ((96, 64), 3, 8)],
)
def test_bytes_are_where_the_format_says(tokens, dims, groups, padded_to):
    """Counted by hand: rows of K, rows of V, then group after group of scales, each with a place for every token."""
    k, v = (rows_with_loud_groups(2, 3, tokens, dim) for dim in dims)
    packed = PackedKV.of(k, v, KVFormat(3, 2, *dims, torch.float32, is_int8=True))
    places = -(-tokens // padded_to) * padded_to
    layer_bytes = tokens * sum(dims) + 2 * groups * places
    assert packed.data.shape == (2, 3 * layer_bytes)
    for head, layer in ((0, 0), (1, 0), (0, 2), (1, 1)):
        own = packed.data[head, layer * layer_bytes : (layer + 1) * layer_bytes]
        scales = own[tokens * sum(dims) :].clone().view(SCALE).view(groups, places).double()
        assert not scales[:, tokens:].any()
        group = 0
        for begin, dim, rows in ((0, dims[0], k), (tokens * dims[0], dims[1], v)):
            numbers = own[begin : begin + tokens * dim].view(tokens, dim).double()
            for first in range(0, dim, 64):
                columns = slice(first, min(first + 64, dim))
                off = (numbers[:, columns] * scales[group, :tokens, None] - rows[head, layer, :, columns]).abs()
                assert (off <= scales[group, :tokens, None] * (0.5 + 1e-5)).all()
                group += 1
        assert group == groups


@given(
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 60),
    st.sampled_from([(64, 64), (128, 128), (512, 64), (6, 2), (80, 80), (96, 48), (256, 256), (576, 64)]),
    st.booleans(),
)
def test_layers_follow_one_another_and_begin_where_copies_are_fast(windowed, tail, tokens, dims, is_int8):
    tails = WindowTails(tuple(index for index, cut in enumerate(windowed) if cut), tail)
    own = KVFormat(len(windowed), 2, *dims, torch.bfloat16, tails, is_int8)
    begins = [own.begin(layer, tokens) for layer in range(len(windowed) + 1)]
    for layer, (begin, end) in enumerate(pairwise(begins)):
        kept = tails.kept(layer, tokens)
        count = sum(-(-dim // 64) for dim in dims)
        together = 8 if count % 2 else 4
        scales = count * 2 * (-(-kept // together) * together) if is_int8 else 0
        assert end - begin == kept * sum(dims) + scales
        if is_int8 and sum(dims) % 16 == 0:
            assert begin % 16 == 0
    assert begins[0] == 0
    assert begins[-1] == own.num_elements(tokens)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (512, 64)])
def test_an_entry_takes_about_half_the_bytes(dims):
    share = (64 + 2) / (64 * 2)
    exact = KVFormat(30, 3, *dims, torch.bfloat16)
    small = KVFormat(30, 3, *dims, torch.bfloat16, is_int8=True)
    for tokens in (16, 104, 1000):
        assert small.nbytes(tokens) / exact.nbytes(tokens) == pytest.approx(share, abs=0.001)
    assert small.bytes_per_token / exact.bytes_per_token == pytest.approx(share, abs=0.001)


@pytest.mark.parametrize("dims", [(8, 4), (80, 48)])
def test_heads_and_layers_can_be_taken_out(dims):
    """A rank with fewer heads, or a stage with fewer layers, has slices of the same bytes."""
    k, v = (torch.randn(4, 6, 5, dim) for dim in dims)
    own = KVFormat(6, 4, *dims, torch.float32, is_int8=True)
    packed = PackedKV.of(k, v, own)
    heads = PackedKV.of(k[1:3], v[1:3], KVFormat(6, 2, *dims, torch.float32, is_int8=True))
    assert torch.equal(packed.data[1:3], heads.data)
    layers = PackedKV.of(k[:, 2:4], v[:, 2:4], KVFormat(2, 4, *dims, torch.float32, is_int8=True))
    assert torch.equal(packed.data[:, own.begin(2, 5) : own.begin(4, 5)], layers.data)


def test_equal_rows_make_equal_bytes():
    """This includes the unused places of scales, because checksums cover them."""
    k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    own = KVFormat(3, 2, 8, 8, torch.float32, is_int8=True)
    assert torch.equal(PackedKV.of(k, v, own).data, PackedKV.of(k.clone(), v.clone(), own).data)
    begin, end = own.begin(0, 5), own.begin(1, 5)
    scales = PackedKV.of(k, v, own).data[:, begin:end][:, 5 * 16 :].contiguous().view(SCALE).view(2, 2, 8)
    assert not scales[..., 5:].any()
    assert scales[..., :5].all()


def test_key_and_format_have_to_agree():
    exact = ChunkKV.from_kv(ChunkKey(bytes(16), 5, "m", "f"), range(5), [], *torch.randn(2, 2, 3, 5, 8))
    assert not exact.format.is_int8
    with pytest.raises(ValueError, match="its key says otherwise"):
        ChunkKV(KEY, exact.tokens, (), exact.format, exact.data)
    small = ChunkKV.from_kv(KEY, range(5), [], *torch.randn(2, 2, 3, 5, 8))
    with pytest.raises(ValueError, match="its key says otherwise"):
        ChunkKV(exact.key, small.tokens, (), small.format, small.data)
    with pytest.raises(ValueError, match="its key says otherwise"):  # one scale for a row, as in earlier releases
        ChunkKV.from_kv(KEY, range(5), [], *torch.randn(2, 2, 3, 5, 128))
    with pytest.raises(ValueError, match="its key says otherwise"):
        ChunkKV.from_kv(WIDE_KEY, range(5), [], *torch.randn(2, 2, 3, 5, 64))
    with pytest.raises(ValueError, match="odd"):
        KVFormat(1, 1, 3, 4, torch.float32, is_int8=True)


@pytest.mark.parametrize(
    ("fingerprint", "numbers"),
    [
        ("f", ""),
        ("f-id", ""),
        ("int8", ""),
        ("f-id.int8", ""),
        ("f.int8", "int8"),
        ("f.int8-id", "int8"),
        ("f.int8x64", "int8x64"),
        ("f.int8x64-id", "int8x64"),
    ],
)
def test_the_key_says_it(fingerprint, numbers):
    key = ChunkKey(bytes(16), 5, "m", fingerprint)
    assert key.is_int8 == bool(numbers)
    assert key.numbers == numbers
    if numbers and not fingerprint.endswith("-id"):
        assert marked("f", numbers) == fingerprint
    assert ChunkKey.parse(str(key)) == key
    if fingerprint.endswith("-id"):
        assert key.sealed_by == "id"
