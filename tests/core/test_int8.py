"""Rows in 8 bits: how far they may be off, and where their scales are."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.entry import ChunkKV, KVFormat, PackedKV
from kvmosaic.core.int8 import LARGEST, SCALE, SMALLEST_ROW, dequantised, quantised
from kvmosaic.core.key import INT8_MARK, ChunkKey
from kvmosaic.core.window import WHOLE, WindowTails

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KEY = ChunkKey(bytes(16), 5, "m", f"f{INT8_MARK}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 300.0, 60000.0, 1e30])
def test_no_number_is_off_by_more_than_half_a_scale(dtype, size):
    rows = (torch.randn(7, 5, 64) * torch.rand(7, 5, 1).exp()).double()
    rows *= size / rows.abs().max()
    rows = rows.to(dtype)  # some sizes are too small for some dtypes, and then zeros
    if not rows.isfinite().all():
        pytest.skip("too large for this dtype")
    numbers, scales = quantised(rows)
    assert numbers.dtype == torch.int8
    assert numbers.abs().max() <= LARGEST
    assert scales.dtype == SCALE
    assert scales.shape == (7, 5)
    largest = rows.double().abs().amax(-1)
    read = dequantised(numbers, scales).double()
    off = (read - rows.double()).abs().amax(-1)
    half_a_scale = torch.where(scales > 0, scales.double() / 2, torch.inf)  # rows that are nearly 0 have no scale
    assert (off <= torch.minimum(half_a_scale * (1 + 1e-5), largest / 253)).all()
    assert (numbers.abs().amax(-1)[scales > 0] >= LARGEST - 1).all()  # all 8 bits are used


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
    assert torch.equal(scales[:3], alone[1])


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


def test_rows_without_numbers():
    numbers, scales = quantised(torch.zeros(2, 3, 0))
    assert numbers.shape == (2, 3, 0)
    assert not scales.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tails", [WHOLE, WindowTails((0, 2), 3), WindowTails((1,), 9), WindowTails((0, 1, 2), 1)])
@pytest.mark.parametrize("dims", [(8, 8), (32, 8), (6, 10), (5, 3)])
def test_an_entry_reads_as_its_rows_alone_would(dtype, tails, dims):
    k, v = (torch.randn(2, 3, 5, dim).to(dtype) for dim in dims)
    entry = ChunkKV.from_kv(KEY, range(5), [], k, v, tails, "document")
    assert entry.data.dtype == torch.int8
    assert entry.nbytes == entry.format.nbytes(5) == entry.data.nbytes
    for layer in range(3):
        kept = tails.kept(layer, 5)
        for ours, rows in zip(entry.layer(layer), (k, v), strict=True):
            wanted = dequantised(*quantised(rows[:, layer, 5 - kept :])).to(dtype)
            assert ours.dtype == dtype
            assert torch.equal(ours, wanted)


@given(
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 60),
    st.sampled_from([(64, 64), (128, 128), (512, 64), (6, 2)]),
    st.booleans(),
)
def test_layers_follow_one_another_and_begin_where_copies_are_fast(windowed, tail, tokens, dims, is_int8):
    tails = WindowTails(tuple(index for index, cut in enumerate(windowed) if cut), tail)
    own = KVFormat(len(windowed), 2, *dims, torch.bfloat16, tails, is_int8)
    begins = [own.begin(layer, tokens) for layer in range(len(windowed) + 1)]
    for layer, (begin, end) in enumerate(pairwise(begins)):
        kept = tails.kept(layer, tokens)
        scales = 2 * SCALE.itemsize * (-(-kept // 4) * 4) if is_int8 else 0
        assert end - begin == kept * sum(dims) + scales
        if is_int8 and sum(dims) % 16 == 0:
            assert begin % 16 == 0
    assert begins[0] == 0
    assert begins[-1] == own.num_elements(tokens)


@pytest.mark.parametrize(("dims", "share"), [((64, 64), 0.5156), ((128, 128), 0.5078), ((512, 64), 0.5035)])
def test_an_entry_takes_about_half_the_bytes(dims, share):
    exact = KVFormat(30, 3, *dims, torch.bfloat16)
    small = KVFormat(30, 3, *dims, torch.bfloat16, is_int8=True)
    for tokens in (16, 100, 1000):
        assert small.nbytes(tokens) / exact.nbytes(tokens) == pytest.approx(share, abs=0.001)
    assert small.bytes_per_token / exact.bytes_per_token == pytest.approx(share, abs=0.001)


def test_heads_and_layers_can_be_taken_out():
    """A rank with fewer heads, or a stage with fewer layers, has slices of the same bytes."""
    k, v = torch.randn(4, 6, 5, 8), torch.randn(4, 6, 5, 4)
    own = KVFormat(6, 4, 8, 4, torch.float32, is_int8=True)
    packed = PackedKV.of(k, v, own)
    heads = PackedKV.of(k[1:3], v[1:3], KVFormat(6, 2, 8, 4, torch.float32, is_int8=True))
    assert torch.equal(packed.data[1:3], heads.data)
    layers = PackedKV.of(k[:, 2:4], v[:, 2:4], KVFormat(2, 4, 8, 4, torch.float32, is_int8=True))
    assert torch.equal(packed.data[:, own.begin(2, 5) : own.begin(4, 5)], layers.data)


def test_equal_rows_make_equal_bytes():
    """Also in the places of scales that no token has: checksums are made of them."""
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
    with pytest.raises(ValueError, match="odd"):
        KVFormat(1, 1, 3, 4, torch.float32, is_int8=True)


@pytest.mark.parametrize("fingerprint", ["f", "f-id", "int8", "f-id.int8", f"f{INT8_MARK}", f"f{INT8_MARK}-id"])
def test_the_key_says_it(fingerprint):
    key = ChunkKey(bytes(16), 5, "m", fingerprint)
    assert key.is_int8 == fingerprint.startswith(f"f{INT8_MARK}")
    assert ChunkKey.parse(str(key)) == key
    if fingerprint.endswith("-id"):
        assert key.sealed_by == "id"
