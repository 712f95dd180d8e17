"""The head-major layout."""

import pytest
import torch

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey

KEY = ChunkKey(bytes(16), 5, "m", "f")


def test_layout_is_head_major_and_one_head_is_contiguous():
    k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    entry = ChunkKV.from_kv(KEY, range(5), [], k, v)
    assert torch.equal(entry.data.view(2, 3, 2, 5, 8), torch.stack([k, v], dim=2))
    assert entry.data[1].is_contiguous()
    assert torch.equal(entry.k, k)
    assert torch.equal(entry.v, v)
    assert entry.nbytes == 5 * entry.format.bytes_per_token


def test_unequal_dims_of_mla():
    k, v = torch.randn(1, 3, 5, 32), torch.randn(1, 3, 5, 8)
    entry = ChunkKV.from_kv(KEY, range(5), [1], k, v)
    assert torch.equal(entry.k, k)
    assert torch.equal(entry.v, v)
    assert entry.first_position == 1


def test_wrong_shape_or_dtype_is_refused():
    kv_format = KVFormat(3, 2, 8, 8, torch.float32)
    for data in (torch.zeros(2, 3, 79), torch.zeros(2, 3, 80, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="its format says"):
            ChunkKV(KEY, tuple(range(5)), (), kv_format, data)


def test_matches_needs_tokens_and_context():
    entry = ChunkKV.from_kv(KEY, range(5), [7], torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2))
    assert entry.matches(range(5), [7])
    assert not entry.matches([0, 1, 2, 3, 5], [7])
    assert not entry.matches(range(5), [])
