"""Entries into vLLM's blocks and out of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import lcm
from typing import NamedTuple

import torch

from kvmosaic.blend.base import Part as KVPart
from kvmosaic.core.entry import VIRTUAL_POS_START, ChunkKV
from kvmosaic.core.window import WindowTails
from kvmosaic.engines.vllm.forward.runs import Row
from kvmosaic.engines.vllm.forward.sparse import SparseForward

KV = tuple[torch.Tensor, torch.Tensor]
"""K ``[heads, layers, tokens, k_dim]`` and V ``[heads, layers, tokens, v_dim]``."""


class Part(NamedTuple):
    """Some consecutive tokens of a row."""

    row: int
    start: int
    end: int
    """Positions ``start .. end-1`` of the row's sequence."""


class RequestBlocks(ABC):
    """Moves KV between entries and the blocks of requests."""

    _forward: SparseForward
    tails: WindowTails
    """What entries keep of layers with a sliding window."""

    @abstractmethod
    def place(
        self, moves: Sequence[tuple[ChunkKV, int]], blocks: Sequence[Sequence[int]], first: int
    ) -> torch.cuda.Event | None:
        """Remap entries to ascending positions of a sequence, except below ``first``: those are in blocks that other
        requests may share. When that will be over, if it happens beside the engine's stream."""

    @abstractmethod
    def compute(self, rows: Sequence[Row], parts: Sequence[Part]) -> list[KV]:
        """Run rows, and return the KV of some parts of them."""

    @property
    @abstractmethod
    def can_read(self) -> bool:
        """Whether :meth:`read` works with this cache."""

    @abstractmethod
    def read(self, blocks: Sequence[int], start: int, end: int) -> KV:
        """The KV at positions ``start .. end-1`` of a sequence."""

    @abstractmethod
    def reused(
        self,
        moves: Sequence[tuple[ChunkKV, int]],
        blocks: Sequence[Sequence[int]],
        layers: Sequence[int],
        part: KVPart,
    ) -> Iterator[torch.Tensor]:
        """K or V of entries that were put in place, ``[kv_heads, tokens, dim]``, keys turned, at one layer after the
        other."""

    def fill(
        self, context: Sequence[int], chunks: Sequence[Sequence[int]], blocks: Sequence[Sequence[int]]
    ) -> list[KV]:
        """Canonical KV of each chunk, computed alone after ``context``, in ``blocks`` that nobody else uses. They
        have room for any one of the chunks, and take as many at a time as fit.

        The context is computed once, as far as it fills blocks; its rest, which shares a block with the chunk, for
        each of them."""
        assert VIRTUAL_POS_START == 0
        sizes = self._forward.block_sizes
        shared = len(context) // lcm(*sizes) * lcm(*sizes)
        first = [shared // size for size in sizes]
        results: list[KV] = []
        rows = [Row(context[:shared], 0, blocks)] if shared else []
        used = list(first)

        def run_rows() -> None:
            parts = [Part(index, len(context), row.end) for index, row in enumerate(rows) if row.end > len(context)]
            results.extend(self.compute(rows, parts))
            rows.clear()

        for chunk in chunks:
            end = len(context) + len(chunk)
            need = [-(-end // size) - known for size, known in zip(sizes, first, strict=True)]
            if any(u + n > len(row) for u, n, row in zip(used, need, blocks, strict=True)):
                run_rows()
                used = list(first)
            own = [(*row[:k], *row[u : u + n]) for row, k, u, n in zip(blocks, first, used, need, strict=True)]
            rows.append(Row([*context[shared:], *chunk], shared, own))
            used = [u + n for u, n in zip(used, need, strict=True)]
        run_rows()
        return results
