"""Entries whose bytes all follow from a number, and comparisons of them."""

import torch

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey, content_hash

CONTEXT = (1,)


def make_entry(
    number: int,
    *,
    tokens: int = 4,
    heads: int = 2,
    layers: int = 2,
    k_dim: int = 3,
    v_dim: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    tenant: str = "default",
    version: int = 0,
) -> ChunkKV:
    """``version`` changes the data but not the key."""
    ids = tuple(range(number * 1000, number * 1000 + tokens))
    key = ChunkKey(content_hash(ids, CONTEXT), tokens, "org/model", "f0", tenant)
    kv_format = KVFormat(layers, heads, k_dim, v_dim, dtype)
    generator = torch.Generator().manual_seed(number * 17 + version)
    shape = (heads, layers * tokens * (k_dim + v_dim) * dtype.itemsize)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return ChunkKV(key, ids, CONTEXT, kv_format, raw.view(dtype))


def same(a: ChunkKV, b: ChunkKV) -> bool:
    """Whether two entries are equal bit for bit. Random bytes contain NaNs, which ``torch.equal`` would call
    different."""
    fields = (a.key, a.tokens, a.context, a.format) == (b.key, b.tokens, b.context, b.format)
    return fields and torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
