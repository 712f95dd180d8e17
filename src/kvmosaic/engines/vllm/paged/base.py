"""Copying entries into vLLM's blocks and out of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import repeat
from math import lcm
from typing import NamedTuple

import torch

from kvmosaic.blend.base import KVPart
from kvmosaic.core.entry import VIRTUAL_POS_START, ChunkKV, KVFormat, PackedKV
from kvmosaic.core.window import WindowTails
from kvmosaic.engines.vllm.forward.images import SequenceImages
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward


class RunRange(NamedTuple):
    """Some consecutive tokens of a run."""

    run: int
    """Index in a list of runs."""
    start: int
    end: int
    """Positions ``start .. end-1`` of the run's sequence."""


class RequestBlocks(ABC):
    """Moves KV between entries and the blocks of requests."""

    _forward: SparseForward
    format: KVFormat
    """Format of this engine's exact entries. Sizes are taken from it, never from an entry."""

    @property
    def block_size(self) -> int:
        """Number of tokens of a block in the first KV cache group."""
        return self._forward.kv.block_sizes[0]

    @property
    def tails(self) -> WindowTails:
        """Tokens that entries keep in layers with a sliding window."""
        return self.format.tails

    def check_formats(self, moves: Sequence[tuple[ChunkKV, int]]) -> None:
        """Raise a ``ValueError`` if an entry has another format, because it would be written into other requests'
        blocks. The store returns no such entry."""
        for entry, _ in moves:
            if entry.format != self.format.of(entry.key):
                raise ValueError(f"an entry of {entry.format} cannot be placed where there is {self.format}")

    @abstractmethod
    def place(
        self, moves: Sequence[tuple[ChunkKV, int]], blocks: Sequence[Sequence[int]], start: int
    ) -> torch.cuda.Event | None:
        """Remap entries to ascending positions of a sequence. Positions below ``start`` are not written, because
        other requests may share their blocks. Returns an event that marks the end, if the copy runs beside the
        engine's stream."""

    @abstractmethod
    def compute(
        self, runs: Sequence[Run], ranges: Sequence[RunRange] = (), form: KVFormat | None = None
    ) -> list[PackedKV]:
        """Compute runs, and return the KV of ``ranges`` of them in the format ``form``, by default exactly."""

    @property
    @abstractmethod
    def can_read(self) -> bool:
        """Whether :meth:`read` works with this cache."""

    @property
    def holds_computed(self) -> bool:
        """Whether :meth:`read` returns KV as it was computed. A quantised cache has rounded it."""
        return self.can_read and not self._forward.kv.is_quantised

    @abstractmethod
    def read(self, blocks: Sequence[int], start: int, end: int, form: KVFormat) -> PackedKV:
        """The KV at positions ``start .. end-1`` of a sequence, in the format ``form``."""

    @abstractmethod
    def reused(
        self,
        moves: Sequence[tuple[ChunkKV, int]],
        blocks: Sequence[Sequence[int]],
        layers: Sequence[int],
        part: KVPart,
    ) -> Iterator[torch.Tensor]:
        """K or V of entries that were placed, ``[kv_heads, tokens, dim]``, with keys rotated, one layer after the
        other."""

    def fill(
        self,
        context: Sequence[int],
        chunks: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
        form: KVFormat,
        sink: ChunkKV | None = None,
        adapter_id: int = 0,
        images: Sequence[SequenceImages | None] = (),
    ) -> list[PackedKV]:
        """Canonical KV of each chunk, computed alone after ``context``, in ``blocks`` that no request uses, in the
        format ``form``. The blocks have room for any one of the chunks; as many chunks as fit are computed at a time.

        The part of the context that fills whole blocks is computed once. The rest shares a block with the chunk, so
        it is computed for each chunk. If ``context`` stands for a learned ``sink``, the sink is placed instead, and
        no context is computed. Tokens are computed with the active adapter ``adapter_id``, or with none (0).
        ``images``: those of each chunk behind the context, if any chunk has some."""
        assert VIRTUAL_POS_START == 0
        sizes = self._forward.kv.block_sizes
        shared = len(context) // lcm(*sizes) * lcm(*sizes)
        first = [shared // size for size in sizes]
        results: list[PackedKV] = []
        following = next(iter(context[shared:]), None)
        begin = Run(context[:shared], 0, blocks, adapter_id, following=following)
        runs = [begin] if shared and sink is None else []
        used = list(first)
        if sink is not None:
            self.place([(sink, 0)], blocks, 0)

        def compute() -> None:
            ranges = [
                RunRange(index, len(context), run.end) for index, run in enumerate(runs) if run.end > len(context)
            ]
            results.extend(self.compute(runs, ranges, form))
            runs.clear()

        for chunk, inside in zip(chunks, images or repeat(None), strict=False):
            end = len(context) + len(chunk)
            need = [-(-end // size) - known for size, known in zip(sizes, first, strict=True)]
            if any(u + n > len(row) for u, n, row in zip(used, need, blocks, strict=True)):
                compute()
                used = list(first)
            own = [(*row[:k], *row[u : u + n]) for row, k, u, n in zip(blocks, first, used, need, strict=True)]
            if sink is None:
                runs.append(Run([*context[shared:], *chunk], shared, own, adapter_id, inside))
            else:
                if shared < len(context):
                    self.place([(sink, 0)], own, shared)
                runs.append(Run(chunk, len(context), own, adapter_id, inside))
            used = [u + n for u, n in zip(used, need, strict=True)]
        compute()
        return results
