"""Attention of a pass that may have more runs than a backend takes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvmosaic.engines.vllm.compat.layers import Backend, KVLayer
from kvmosaic.engines.vllm.forward.metadata import MetadataBuilder
from kvmosaic.engines.vllm.forward.runs import Pass
from kvmosaic.engines.vllm.forward.tile_attention import TileAttention
from kvmosaic.kernels.queries import Queries


class PassAttention(ABC):
    """Computes attention of a pass, layer by layer."""

    metadata: dict[str, Any] | None = None
    """Attention metadata of the whole pass by layer, if a backend is to compute it in one go."""

    @abstractmethod
    def compute(self, layer: KVLayer, q: torch.Tensor, out: torch.Tensor, backend: Backend) -> None:
        """Attention of ``q`` ``[tokens, heads, dim]`` over a layer's cache, into ``out``."""


class InTiles(PassAttention):
    """By our own kernel."""

    def __init__(self, tiles: TileAttention, queries: Mapping[int, Queries]) -> None:
        """``queries``: the tokens in tiles, by number of query heads."""
        self._tiles = tiles
        self._queries = queries

    def compute(self, layer: KVLayer, q: torch.Tensor, out: torch.Tensor, backend: Backend) -> None:
        self._tiles.attend(layer, q, self._queries[layer.heads], out)


class InParts(PassAttention):
    """By the backend, one part of the pass after the other."""

    def __init__(self, builder: MetadataBuilder, parts: Sequence[Pass]) -> None:
        """``parts`` have no more runs than the backend takes."""
        self._builder = builder
        self._parts = parts
        if len(parts) == 1:
            self.metadata = builder.build(parts[0])

    def compute(self, layer: KVLayer, q: torch.Tensor, out: torch.Tensor, backend: Backend) -> None:
        if self.metadata is not None:
            backend()
            return
        begin = 0
        for part in self._parts:
            end = begin + part.num_tokens
            # Made for each layer, because builders may reuse their buffers.
            backend(slice(begin, end), self._builder.build(part)[layer.name])
            begin = end
