"""KV caches handed to a transformers model in place of its own."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.engines.chunk_cache import KV


class PositionedCache(Cache):
    """A cache whose rows have explicit positions, which do not follow from its length."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise UnsupportedModelError(
            "the model derives positions from the length of its cache instead of using the given ones"
        )

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0  # not used: the active attention plan makes the mask

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0  # not used either


class RequestKV(PositionedCache):
    """The KV of one request, at its true positions: remapped chunks plus KV that the model computes.

    ``k`` is ``[layers, heads, capacity, k_dim]``, ``v`` ``[layers, heads, capacity, v_dim]``. Before a
    forward, :meth:`expect` says which positions its rows have; each layer's rows are written there
    *before* attention reads, so a token sees fresh keys where there are any and reused ones elsewhere.
    """

    def __init__(self, kv_format: KVFormat, capacity: int, device: torch.device) -> None:
        super().__init__()
        shape = (kv_format.layers, kv_format.heads, capacity)
        # Zeros, because rows that no token may see yet are multiplied by weights of 0, and uninitialized memory may
        # hold NaN.
        self.k = torch.zeros(*shape, kv_format.k_dim, dtype=kv_format.dtype, device=device)
        self.v = torch.zeros(*shape, kv_format.v_dim, dtype=kv_format.dtype, device=device)
        self._positions = torch.empty(0, dtype=torch.long, device=device)
        self._length = 0
        self.on_write: Callable[[int, dict[str, torch.Tensor], dict[str, torch.Tensor]], None] | None = None
        """Called with each layer's index, its new K and V rows and those they replace, all ``[heads, rows, dim]``."""

    def expect(self, positions: torch.Tensor, length: int) -> None:
        """The next forward computes rows at ``positions`` and may see positions below ``length``."""
        assert length <= self.k.shape[2]
        self._positions, self._length = positions, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.k[layer_idx], self.v[layer_idx]
        if self.on_write is not None:
            old = {"k": k[:, self._positions], "v": v[:, self._positions]}
            self.on_write(layer_idx, {"k": key_states[0], "v": value_states[0]}, old)
        k.index_copy_(1, self._positions, key_states[0])
        v.index_copy_(1, self._positions, value_states[0])
        return k[None, :, : self._length], v[None, :, : self._length]


class CapturedKV(PositionedCache):
    """Records the KV that a model would cache, by layer, for rows that see only themselves and a learned sink."""

    def __init__(self, sink: KV | None = None) -> None:
        """``sink``: KV before each row, K ``[heads, layers, tokens, k_dim]`` and V ``[…, v_dim]``."""
        super().__init__()
        self._sink = sink
        self.captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.captured[layer_idx] = (key_states, value_states)
        if self._sink is None:
            return key_states, value_states
        k, v = (
            torch.cat([part[:, layer_idx].expand(len(rows), -1, -1, -1), rows], dim=2)
            for part, rows in zip(self._sink, (key_states, value_states), strict=True)
        )
        return k, v

    def row(self, index: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one batch row, ``[heads, layers, tokens, dim]`` each."""
        k, v = (
            torch.stack([self.captured[layer][part][index, :, tokens] for layer in sorted(self.captured)], dim=1)
            for part in (0, 1)
        )
        return k, v
