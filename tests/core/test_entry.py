"""The head-major layout."""

import pytest
import torch

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.window import WindowTails
from tests.entries import kv_of

KEY = ChunkKey(bytes(16), 5, "m", "f")


def test_layout_is_head_major_and_one_head_is_contiguous():
    k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    entry = ChunkKV.from_kv(KEY, range(5), [], k, v)
    assert torch.equal(entry.data.view(2, 3, 2, 5, 8), torch.stack([k, v], dim=2))
    assert entry.data[1].is_contiguous()
    assert all(map(torch.equal, kv_of(entry), (k, v)))
    assert entry.nbytes == 5 * entry.format.bytes_per_token


def test_unequal_dims_of_mla():
    k, v = torch.randn(1, 3, 5, 32), torch.randn(1, 3, 5, 8)
    entry = ChunkKV.from_kv(KEY, range(5), [1], k, v)
    assert all(map(torch.equal, kv_of(entry), (k, v)))
    assert entry.first_position == 1


@pytest.mark.parametrize("tail", [1, 3, 5, 9])
def test_windowed_layers_keep_the_last_tokens(tail):
    k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 6)
    entry = ChunkKV.from_kv(KEY, range(5), [], k, v, WindowTails((0, 2), tail))
    kept = min(tail, 5)
    assert entry.nbytes == 2 * (2 * 5 + 2 * kept) * (8 + 6) * 4
    for layer in range(4):
        start = 5 - kept if layer in (0, 2) else 0
        ours = entry.layer(layer)
        assert torch.equal(ours[0], k[:, layer, start:])
        assert torch.equal(ours[1], v[:, layer, start:])


def test_wrong_shape_or_dtype_is_refused():
    kv_format = KVFormat(3, 2, 8, 8, torch.float32)
    for data in (torch.zeros(2, 239), torch.zeros(2, 240, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="its format says"):
            ChunkKV(KEY, tuple(range(5)), (), kv_format, data)


def test_matches_needs_tokens_and_context():
    entry = ChunkKV.from_kv(KEY, range(5), [7], torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2))
    assert entry.matches(range(5), [7])
    assert not entry.matches([0, 1, 2, 3, 5], [7])
    assert not entry.matches(range(5), [])


def test_entries_with_a_long_context_are_compared_by_one_comparison():
    """This holds once they have been looked up together. Before, each has its own copy of the context, as it was
    read."""
    compared = 0

    class Token(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return int(self) == int(other)

    k = v = torch.zeros(1, 1, 5, 2)
    entries = [ChunkKV.from_kv(KEY, range(5), list(range(1000, 1100)), k, v) for _ in range(20)]
    counts = []
    for _ in range(3):
        context = tuple(map(Token, range(1000, 1100)))
        compared = 0
        assert all(entry.matches(range(5), context) for entry in entries)
        counts.append(compared)
    assert counts == [20 * 100, 100, 100]
    others = (*context[:-1], Token(5)), context[:-1], (*context, Token(5))
    assert not any(entry.matches(range(5), other) for entry in entries for other in others)
    assert all(entry.context == tuple(range(1000, 1100)) for entry in entries)
