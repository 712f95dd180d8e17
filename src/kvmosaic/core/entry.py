"""An entry: one chunk's canonical KV, head-major and immutable."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvmosaic.core.key import ChunkKey

VIRTUAL_POS_START = 0
"""Position of the first context token (sink prefix) when a chunk is computed alone."""


@dataclass(frozen=True)
class KVFormat:
    """Geometry of the KV of one token. ``v_dim`` may differ from ``k_dim``: an MLA model caches one
    latent "head" whose K part is the latent and whose V part is the rotated key columns."""

    layers: int
    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * (self.k_dim + self.v_dim) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """One chunk's canonical KV.

    ``data`` is ``[heads, layers, tokens * (k_dim + v_dim)]``: per head and layer first all K rows, then
    all V rows. With equal dims that is ``[heads, layers, 2, tokens, head_dim]``, so one head is one
    contiguous buffer and a tensor-parallel rank of any size reads exactly the heads it owns.
    """

    key: ChunkKey
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    """Tokens the chunk was computed after (sink prefix or system prompt); their own KV is dropped."""
    format: KVFormat
    data: torch.Tensor

    def __post_init__(self) -> None:
        width = len(self.tokens) * (self.format.k_dim + self.format.v_dim)
        expected = (self.format.heads, self.format.layers, width)
        if tuple(self.data.shape) != expected or self.data.dtype != self.format.dtype:
            raise ValueError(f"entry data is {tuple(self.data.shape)} {self.data.dtype}, its format says {expected}")

    @classmethod
    def from_kv(
        cls,
        key: ChunkKey,
        tokens: Sequence[int],
        context: Sequence[int],
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> "ChunkKV":
        """Pack K ``[heads, layers, tokens, k_dim]`` and V ``[heads, layers, tokens, v_dim]`` into an entry."""
        heads, layers, count, k_dim = k.shape
        data = torch.cat([k.reshape(heads, layers, -1), v.reshape(heads, layers, -1)], dim=-1)
        kv_format = KVFormat(layers, heads, k_dim, v.shape[-1], k.dtype)
        assert count == len(tokens)
        return cls(key, tuple(tokens), tuple(context), kv_format, data)

    @property
    def k(self) -> torch.Tensor:
        """K rows, a view ``[heads, layers, tokens, k_dim]``."""
        split = len(self.tokens) * self.format.k_dim
        return self.data[..., :split].view(*self.data.shape[:2], len(self.tokens), self.format.k_dim)

    @property
    def v(self) -> torch.Tensor:
        """V rows, a view ``[heads, layers, tokens, v_dim]``."""
        split = len(self.tokens) * self.format.k_dim
        return self.data[..., split:].view(*self.data.shape[:2], len(self.tokens), self.format.v_dim)

    @property
    def first_position(self) -> int:
        """Virtual position of the chunk's first token."""
        return VIRTUAL_POS_START + len(self.context)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def matches(self, tokens: Sequence[int], context: Sequence[int]) -> bool:
        """Whether this really is the KV of these tokens: a hash alone is never trusted."""
        return self.tokens == tuple(tokens) and self.context == tuple(context)
