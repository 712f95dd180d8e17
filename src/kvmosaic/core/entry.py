"""An entry: one chunk's canonical KV, head-major and immutable."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

import torch

from kvmosaic.core.key import ChunkKey
from kvmosaic.core.window import WHOLE, WindowTails

VIRTUAL_POS_START = 0
"""Position of the first context token (sink prefix) when a chunk is computed alone."""

_latest_equal: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
"""The two contexts that were found equal most recently."""


EntryKind = Literal["document", "system-tail", "prefix-part"]
"""Kind of an entry: a chunk, the end of a system prompt, or a piece of an exact prefix."""
ENTRY_KINDS: tuple[EntryKind, ...] = get_args(EntryKind)


@dataclass(frozen=True)
class KVFormat:
    """Geometry of the KV of one token. ``v_dim`` may differ from ``k_dim``: an MLA model caches one
    latent "head" whose K part is the latent and whose V part is the rotated key columns."""

    layers: int
    heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    tails: WindowTails = WHOLE
    """Layers with a sliding window that keep only the last tokens."""

    def __post_init__(self) -> None:
        sizes, windowed = (self.layers, self.heads, self.k_dim, self.v_dim), self.tails.layers
        ascending = all(a < b for a, b in pairwise((-1, *windowed, self.layers)))
        if min(sizes) < 0 or self.tails.tokens < 0 or not ascending:
            raise ValueError(
                f"invalid KV format: {self.layers} layers, {self.heads} heads, dims {self.k_dim} and {self.v_dim}"
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that all layers keep."""
        return self.layers * self.heads * (self.k_dim + self.v_dim) * self.dtype.itemsize

    def of_layers(self, first: int, last: int) -> "KVFormat":
        """The format of layers ``first .. last`` alone."""
        if last - first + 1 == self.layers:
            return self
        windowed = tuple(layer - first for layer in self.tails.layers if first <= layer <= last)
        tails = WindowTails(windowed, self.tails.tokens) if windowed else WHOLE
        return replace(self, layers=last - first + 1, tails=tails)

    def num_elements(self, tokens: int) -> int:
        """Elements per head of an entry of ``tokens`` tokens."""
        return self.tails.rows(self.layers, tokens) * (self.k_dim + self.v_dim)


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """One chunk's canonical KV.

    ``data`` is ``[heads, numbers]``. Each head has layer after layer, first the K rows, then the V rows, of all
    tokens or of the last ones. With equal dims and no tokens left out, that is
    ``[heads, layers, 2, tokens, head_dim]``. Each head is one contiguous buffer, so a rank of any tensor-parallel
    size reads exactly the heads it owns.
    """

    key: ChunkKey
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    """Tokens the chunk was computed after (sink prefix or system prompt); their own KV is dropped."""
    format: KVFormat
    data: torch.Tensor
    kind: EntryKind | None = None
    """Kind of the entry; ``None`` if it is unknown, because earlier releases did not record it."""

    def __post_init__(self) -> None:
        expected = (self.format.heads, self.format.num_elements(len(self.tokens)))
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
        tails: WindowTails = WHOLE,
        kind: EntryKind | None = None,
    ) -> "ChunkKV":
        """Pack K ``[heads, layers, tokens, k_dim]`` and V ``[heads, layers, tokens, v_dim]`` into an entry,
        without the tokens that ``tails`` leave out."""
        heads, layers, count, k_dim = k.shape
        assert count == len(tokens)
        kv_format = KVFormat(layers, heads, k_dim, v.shape[-1], k.dtype, tails)
        if tails.cuts(count):
            starts = [count - tails.kept(layer, count) for layer in range(layers)]
            parts = [part[:, layer, start:] for layer, start in enumerate(starts) for part in (k, v)]
            data = torch.cat([part.reshape(heads, -1) for part in parts], dim=1)
        else:
            data = torch.cat([k.reshape(heads, layers, -1), v.reshape(heads, layers, -1)], dim=-1).view(heads, -1)
        return cls(key, tuple(tokens), tuple(context), kv_format, data, kind)

    def of_layers(self, first: int, last: int) -> "ChunkKV":
        """An entry of layers ``first .. last`` alone, under the same key. Its data is a view."""
        begins = self.format.tails.begins(self.format.layers, len(self.tokens))
        width = self.format.k_dim + self.format.v_dim
        data = self.data[:, begins[first] * width : begins[last + 1] * width]
        return replace(self, format=self.format.of_layers(first, last), data=data)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, kept, k_dim]`` and V ``[heads, kept, v_dim]`` of a layer's last ``kept`` tokens, as views."""
        kv_format, tokens = self.format, len(self.tokens)
        width = kv_format.k_dim + kv_format.v_dim
        kept = kv_format.tails.kept(index, tokens)
        begin = kv_format.tails.begins(index, tokens)[-1] * width
        split, end = begin + kept * kv_format.k_dim, begin + kept * width
        return (
            self.data[:, begin:split].view(kv_format.heads, kept, kv_format.k_dim),
            self.data[:, split:end].view(kv_format.heads, kept, kv_format.v_dim),
        )

    @property
    def first_position(self) -> int:
        """Virtual position of the chunk's first token."""
        return VIRTUAL_POS_START + len(self.context)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def matches(self, tokens: Sequence[int], context: Sequence[int]) -> bool:
        """Whether this is the KV of these tokens. The tokens are compared, because a hash alone is never trusted."""
        return self.tokens == tuple(tokens) and self._is_after(tuple(context))

    def _is_after(self, context: tuple[int, ...]) -> bool:
        """Whether ``context`` equals the entry's own. A context may be a long system prompt of many chunks, so an
        equal ``context`` replaces the entry's own. Entries that are looked up together then share one object, and the
        next lookup needs only one comparison for all of them."""
        global _latest_equal
        own, (before, latest) = self.context, _latest_equal
        if own is context:
            return True
        if not (own is before and context is latest):
            if own != context:
                return False
            _latest_equal = own, context
        object.__setattr__(self, "context", context)
        return True
