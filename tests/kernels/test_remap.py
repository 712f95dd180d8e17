"""The embedded engine's copy of an entry to its place."""

import pytest
import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.kernels.remap import remap


def entry(
    layers: int = 2, heads: int = 2, k_dim: int = 4, v_dim: int = 6, dtype: torch.dtype = torch.float32
) -> ChunkKV:
    k, v = (torch.ones(heads, layers, 3, dim, dtype=dtype) for dim in (k_dim, v_dim))
    return ChunkKV.from_kv(ChunkKey(bytes(16), 3, "m", "f"), range(3), (), k, v)


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 1},  # which torch would spread over all heads
        {"heads": 4},
        {"k_dim": 1},
        {"v_dim": 1},
        {"dtype": torch.float16},
        {"layers": 1},
    ],
)
def test_an_entry_of_other_sizes_is_written_nowhere(wrong: dict[str, int]) -> None:
    k, v = torch.zeros(2, 2, 8, 4), torch.zeros(2, 2, 8, 6)
    with pytest.raises(ValueError, match="cannot be placed"):
        remap(entry(**wrong), k, v, 1, [None, None])
    assert not k.any()
    assert not v.any()
    remap(entry(), k, v, 1, [None, None])
    assert k[:, :, 1:4].all()
    assert not k[:, :, 4:].any()
