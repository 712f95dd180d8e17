"""An entry: one chunk's canonical KV, head-major and immutable."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch

from kvmosaic.core.int8 import GROUP, SCALE, dequantised, groups_of, quantised, scale_bytes, scale_places
from kvmosaic.core.key import INT8, ChunkKey
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
    """Dtype in which the model computes it."""
    tails: WindowTails = WHOLE
    """Layers with a sliding window that keep only the last tokens."""
    is_int8: bool = field(default=False, repr=False)
    """Whether rows are stored in 8 bits, with scales (``core/int8.py``). Not in the text of a format, which
    fingerprints of earlier releases are made of."""

    def __post_init__(self) -> None:
        sizes, windowed = (self.layers, self.heads, self.k_dim, self.v_dim), self.tails.layers
        ascending = all(a < b for a, b in pairwise((-1, *windowed, self.layers)))
        if min(sizes) < 0 or self.tails.tokens < 0 or not ascending:
            raise ValueError(
                f"invalid KV format: {self.layers} layers, {self.heads} heads, dims {self.k_dim} and {self.v_dim}"
            )
        if self.is_int8 and (self.k_dim + self.v_dim) % 2:
            raise ValueError(f"dims {self.k_dim} and {self.v_dim} cannot be stored in 8 bits: their sum is odd")

    def of(self, key: ChunkKey) -> "KVFormat":
        """The format of the entry of ``key``, which says whether it is in 8 bits."""
        return self if self.is_int8 == key.is_int8 else replace(self, is_int8=key.is_int8)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of an entry's data."""
        return torch.int8 if self.is_int8 else self.dtype

    @property
    def numbers(self) -> str:
        """Name of the number format of stored rows, in keys and headers: ``""`` for the model's own, ``int8`` for
        8 bits with one scale for each row, ``int8x64`` for 8 bits with a scale for each 64 columns of longer rows."""
        if not self.is_int8:
            return ""
        return INT8 if self.groups == (1, 1) else f"{INT8}x{GROUP}"

    @property
    def groups(self) -> tuple[int, int]:
        """Number of scales of a row of K and of a row of V, if they are in 8 bits."""
        return groups_of(self.k_dim), groups_of(self.v_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that all layers keep."""
        scales = sum(self.groups) * SCALE.itemsize if self.is_int8 else 0
        return self.layers * self.heads * ((self.k_dim + self.v_dim) * self.stored_dtype.itemsize + scales)

    def of_layers(self, first: int, last: int) -> "KVFormat":
        """The format of layers ``first .. last`` alone."""
        if last - first + 1 == self.layers:
            return self
        windowed = tuple(layer - first for layer in self.tails.layers if first <= layer <= last)
        tails = WindowTails(windowed, self.tails.tokens) if windowed else WHOLE
        return replace(self, layers=last - first + 1, tails=tails)

    def num_elements(self, tokens: int) -> int:
        """Elements of ``stored_dtype`` per head of an entry of ``tokens`` tokens, scales included."""
        return self.begin(self.layers, tokens)

    def nbytes(self, tokens: int) -> int:
        """Bytes of an entry of ``tokens`` tokens."""
        return self.heads * self.num_elements(tokens) * self.stored_dtype.itemsize

    def begin(self, layer: int, tokens: int) -> int:
        """Index of the first element of a layer, in each head of an entry of ``tokens`` tokens."""
        cut = bisect_left(self.tails.layers, layer)
        tail = min(tokens, self.tails.tokens)
        return (layer - cut) * self._layer_elements(tokens) + cut * self._layer_elements(tail)

    def _layer_elements(self, kept: int) -> int:
        """Elements of a layer that keeps ``kept`` tokens."""
        return kept * (self.k_dim + self.v_dim) + (self.scale_elements(kept) if self.is_int8 else 0)

    def scale_elements(self, kept: int) -> int:
        """Elements of the scales of a layer that keeps ``kept`` tokens in 8 bits."""
        groups = sum(self.groups)
        return SCALE.itemsize * groups * scale_places(kept, groups)


class LayerParts(NamedTuple):
    """One layer of an entry, as views of its data."""

    k: torch.Tensor
    """``[heads, kept, k_dim]`` of a layer that keeps the last ``kept`` tokens."""
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    """``[heads, groups, kept]``, if rows are in 8 bits."""
    v_scales: torch.Tensor | None = None


class PackedKV(NamedTuple):
    """KV of some tokens, packed as in an entry.

    ``data`` is ``[heads, elements]``. Each head has layer after layer, first the K rows, then the V rows, of all
    tokens or of the last ones, then, if rows are in 8 bits, the scales of K and those of V: group after group, each
    ``[places]`` with a scale for every row, padded. With equal dims, no tokens left out and no scales, that is
    ``[heads, layers, 2, tokens, head_dim]``. Each head is one contiguous buffer, so a rank of any tensor-parallel
    size reads exactly the heads it owns. Each layer of a head is contiguous as well.
    """

    data: torch.Tensor
    format: KVFormat
    tokens: int

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, kv_format: KVFormat) -> "PackedKV":
        """Pack K ``[heads, layers, tokens, k_dim]`` and V ``[heads, layers, tokens, v_dim]``, without the tokens that
        the format leaves out."""
        heads, layers, tokens, _ = k.shape
        tails = kv_format.tails
        if tails.cuts(tokens):
            starts = [tokens - tails.kept(layer, tokens) for layer in range(layers)]
            parts = [
                part
                for layer, start in enumerate(starts)
                for part in _flat(k[:, layer, start:], v[:, layer, start:], kv_format.is_int8)
            ]
            data = torch.cat(parts, dim=-1)
        else:
            data = torch.cat(_flat(k, v, kv_format.is_int8), dim=-1).view(heads, -1)
        return cls(data, kv_format, tokens)

    def parts(self, layer: int) -> LayerParts:
        """Views of one layer."""
        own = self.format
        kept = own.tails.kept(layer, self.tokens)
        begin, scale_elements = own.begin(layer, self.tokens), own.scale_elements(kept) if own.is_int8 else 0
        sizes = [kept * own.k_dim, kept * own.v_dim, scale_elements]
        k, v, scales = torch.split(self.data[:, begin : begin + sum(sizes)], sizes, dim=1)
        rows = k.view(own.heads, kept, own.k_dim), v.view(own.heads, kept, own.v_dim)
        if not own.is_int8:
            return LayerParts(*rows)
        groups = own.groups
        places = scale_places(kept, sum(groups))
        in_groups = scales.view(SCALE).view(own.heads, sum(groups), places)[..., :kept]
        return LayerParts(*rows, *torch.split(in_groups, list(groups), dim=1))

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, kept, k_dim]`` and V ``[heads, kept, v_dim]`` of a layer's last ``kept`` tokens, in the model's
        dtype. They are views unless rows are in 8 bits."""
        k, v, k_scales, v_scales = self.parts(layer)
        if k_scales is None or v_scales is None:
            return k, v
        return dequantised(k, k_scales).to(self.format.dtype), dequantised(v, v_scales).to(self.format.dtype)

    def layers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, layers, tokens, k_dim]`` and V ``[heads, layers, tokens, v_dim]`` of KV with all tokens."""
        k, v = (torch.stack(part, 1) for part in zip(*map(self.layer, range(self.format.layers)), strict=True))
        return k, v


def _flat(k: torch.Tensor, v: torch.Tensor, is_int8: bool) -> list[torch.Tensor]:
    """The parts of layers of K and V ``[..., tokens, dim]`` as an entry has them, each ``[..., elements]``."""
    if not is_int8:
        return [k.flatten(-2), v.flatten(-2)]
    (k, k_scales), (v, v_scales) = quantised(k), quantised(v)
    return [k.flatten(-2), v.flatten(-2), scale_bytes(torch.cat([k_scales, v_scales], dim=-2))]


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """One chunk's canonical KV. ``data`` is ``[heads, elements]``, see :class:`PackedKV`."""

    key: ChunkKey
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    """Tokens the chunk was computed after (sink prefix or system prompt); their own KV is dropped."""
    format: KVFormat
    data: torch.Tensor
    kind: EntryKind | None = None
    """Kind of the entry; ``None`` if it is unknown, because earlier releases did not record it."""
    lag: int = 0
    """Number by which rotary positions are lower than indices at the entry's place in a prompt. It is not 0 behind
    images in some models. Not stored."""

    def __post_init__(self) -> None:
        expected = (self.format.heads, self.format.num_elements(len(self.tokens)))
        if tuple(self.data.shape) != expected or self.data.dtype != self.format.stored_dtype:
            raise ValueError(f"entry data is {tuple(self.data.shape)} {self.data.dtype}, its format says {expected}")
        if self.format.numbers != self.key.numbers:
            raise ValueError(f"entry data is {self.format.numbers or self.data.dtype}, its key says otherwise")

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
        without the tokens that ``tails`` leave out, in 8 bits if the key says so."""
        heads, layers, count, k_dim = k.shape
        assert count == len(tokens)
        kv_format = KVFormat(layers, heads, k_dim, v.shape[-1], k.dtype, tails, key.is_int8)
        return cls.from_packed(key, tokens, context, PackedKV.of(k, v, kv_format), kind)

    @classmethod
    def from_packed(
        cls,
        key: ChunkKey,
        tokens: Sequence[int],
        context: Sequence[int],
        packed: PackedKV,
        kind: EntryKind | None = None,
    ) -> "ChunkKV":
        """The entry of KV that is packed already."""
        return cls(key, tuple(tokens), tuple(context), packed.format, packed.data, kind)

    def of_layers(self, first: int, last: int) -> "ChunkKV":
        """An entry of layers ``first .. last`` alone, under the same key. Its data is a view."""
        begin, end = (self.format.begin(layer, len(self.tokens)) for layer in (first, last + 1))
        data = self.data[:, begin:end]
        return replace(self, format=self.format.of_layers(first, last), data=data)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, kept, k_dim]`` and V ``[heads, kept, v_dim]`` of a layer's last ``kept`` tokens, see
        :meth:`PackedKV.layer`."""
        return PackedKV(self.data, self.format, len(self.tokens)).layer(index)

    @property
    def first_position(self) -> int:
        """Virtual position of the chunk's first token. A turn from here to an index also takes the lag into account,
        because only the distance counts."""
        return VIRTUAL_POS_START + len(self.context) + self.lag

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
