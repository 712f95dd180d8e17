"""Entries into vLLM's blocks and out of them."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

import torch

from kvmosaic.core.entry import VIRTUAL_POS_START, ChunkKV
from kvmosaic.core.rotation import CosSin, rotate_
from kvmosaic.core.window import WindowTails
from kvmosaic.engines.rotary import LayerRotary, turns_for
from kvmosaic.engines.vllm.compat import paged_cache
from kvmosaic.engines.vllm.packing import BlockReader
from kvmosaic.engines.vllm.rotary import VllmTable
from kvmosaic.engines.vllm.sparse import Row, SparseForward
from kvmosaic.kernels.paged import Move, PagedCaches, gather, gather_reference, scatter

logger = logging.getLogger(__name__)

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
    def place(self, moves: Sequence[tuple[ChunkKV, int]], blocks: Sequence[Sequence[int]], first: int) -> None:
        """Remap entries to ascending positions of a sequence, except below ``first``: those are in blocks that other
        requests may share."""

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


@dataclass(frozen=True, eq=False)
class _Kept:
    """Those tokens of some entries that a layer keeps."""

    tokens: torch.Tensor
    """Which they are among the tokens of all entries, ``[kept]``."""
    skipped: int
    """So many of them, the first, are not to be written."""
    positions: torch.Tensor
    """Where the others go, ``[kept - skipped]``."""

    @classmethod
    def of(cls, moves: Sequence[tuple[ChunkKV, int]], counts: Sequence[int], first: int) -> "_Kept":
        """The last ``counts`` of each entry; what would go to a position below ``first`` is not written."""
        tokens, positions, end = [], [], 0
        for (entry, at), count in zip(moves, counts, strict=True):
            end, last = end + len(entry.tokens), at + len(entry.tokens)
            tokens.append(torch.arange(end - count, end))
            positions.append(torch.arange(last - count, last))
        places = torch.cat(positions)
        skipped = int((places < first).sum())  # they ascend
        return cls(torch.cat(tokens), skipped, places[skipped:])


class KernelBlocks(RequestBlocks):
    """With one kernel launch for everything. Needs a GPU and a cache that is what it looks like."""

    def __init__(self, forward: SparseForward, caches: PagedCaches, tails: WindowTails) -> None:
        self._forward = forward
        self.tails = tails
        self._caches = caches
        self._being_read: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()
        """Host memory that the GPU was told to read. Its allocator does not know, and would hand it out again."""

    @classmethod
    def open(
        cls, forward: SparseForward, rotary: Sequence[LayerRotary | None], tails: WindowTails
    ) -> "KernelBlocks | None":
        """``None`` when the cache is packed or quantised, or keys turn in ways the kernel does not know."""
        layers = [paged_cache(layer) for layer in forward.layers]
        columns = {layer.columns for layer in rotary if layer}
        first = forward.layers[0]
        if (
            forward.device.type != "cuda"
            or len(forward.block_sizes) > 1
            or len(columns) > 1
            or any(column.part == "v" for column in columns)
            or len({(layer.shape, layer.stride(), layer.dtype) for layer in layers}) > 1
            or layers[0].dtype not in (torch.float32, torch.float16, torch.bfloat16)
            or layers[0].shape[1:]
            != (first.num_kv_heads, forward.block_sizes[0], first.head_size + first.head_size_v)
        ):
            return None
        tables = [layer.table.tensor if layer and isinstance(layer.table, VllmTable) else None for layer in rotary]
        caches = PagedCaches(layers, first.head_size, tables, next(iter(columns), None))
        return cls(forward, caches, tails) if _reads_what_the_backend_wrote(forward, caches) else None

    def place(self, moves: Sequence[tuple[ChunkKV, int]], blocks: Sequence[Sequence[int]], first: int) -> None:
        sources = [_readable(entry.data) for entry, _ in moves]
        scatter(
            [
                Move(data, len(entry.tokens), entry.first_position, at)
                for data, (entry, at) in zip(sources, moves, strict=True)
            ],
            self._caches,
            blocks[0],
            first,
            self.tails,
        )
        while self._being_read and self._being_read[0][0].query():
            self._being_read.popleft()
        from_host = [data for data in sources if not data.is_cuda]
        if from_host:
            self._being_read.append((torch.cuda.current_stream().record_event(), from_host))

    def compute(self, rows: Sequence[Row], parts: Sequence[Part]) -> list[KV]:
        self._forward.run(rows)
        if not parts:
            return []
        size = self._caches.block_size
        # The blocks of all rows in question one after the other, as if they were one sequence.
        blocks: list[int] = []
        begins = {}
        for index in sorted({part.row for part in parts}):
            begins[index] = len(blocks) * size
            blocks += rows[index].blocks[0][: -(-rows[index].end // size)]
        moves = [self._room(begins[part.row] + part.start, part.end - part.start) for part in parts]
        gather(moves, self._caches, blocks)
        return [_split(move, self._caches) for move in moves]

    @property
    def can_read(self) -> bool:
        return True

    def read(self, blocks: Sequence[int], start: int, end: int) -> KV:
        move = self._room(start, end - start)
        gather([move], self._caches, blocks)
        return _split(move, self._caches)

    def _room(self, position: int, tokens: int) -> Move:
        """Room for so many tokens of what stands at ``position``."""
        cache = self._caches.layers[0]
        shape = (self._forward.layers[0].num_kv_heads, len(self._caches.layers) * tokens * cache.shape[-1])
        return Move(torch.empty(shape, dtype=cache.dtype, device=self._forward.device), tokens, 0, position)


class BackendBlocks(RequestBlocks):
    """With torch operations, the backend's own writer, and hooks that see KV before it is packed: for any backend."""

    def __init__(
        self,
        forward: SparseForward,
        rotary: Sequence[LayerRotary | None],
        tails: WindowTails,
        reader: BlockReader | None,
    ) -> None:
        self._forward = forward
        self.tails = tails
        self._rotary = rotary
        self._reader = reader

    def place(self, moves: Sequence[tuple[ChunkKV, int]], blocks: Sequence[Sequence[int]], first: int) -> None:
        if not moves:
            return
        assert all(entry.format.tails == self.tails for entry, _ in moves)
        forward, windowed = self._forward, self.tails.layers
        # vLLM's tables do not depend on a prompt's length.
        turns = turns_for(moves, 0, self._rotary)
        moved = [replace(entry, data=entry.data.to(forward.device, non_blocking=True)) for entry, _ in moves]
        everything = _Kept.of(moves, [len(entry.tokens) for entry, _ in moves], first)
        tail = _Kept.of(moves, [min(len(entry.tokens), self.tails.tokens) for entry, _ in moves], first)
        slots = {kept: forward.slots(kept.positions.to(forward.device), blocks) for kept in (everything, tail)}
        for index, layer in enumerate(forward.layers):
            kept = tail if index in windowed else everything
            # [heads, tokens, dim] of all entries
            k, v = (torch.cat(parts, dim=1) for parts in zip(*(entry.layer(index) for entry in moved), strict=True))
            turn = turns[index]
            if turn is not None:
                rows = CosSin(*(part[kept.tokens.to(part.device)] for part in turn.turn))
                rotate_(k if turn.columns.part == "k" else v, rows, turn.columns)
            # [tokens, heads, dim], as backends take it
            k, v = (part[:, kept.skipped :].transpose(0, 1).contiguous() for part in (k, v))
            forward.write(layer, k, v, slots[kept])

    @property
    def can_read(self) -> bool:
        return self._reader is not None

    def read(self, blocks: Sequence[int], start: int, end: int) -> KV:
        assert self._reader is not None
        return self._reader.read(blocks, start, end)

    def compute(self, rows: Sequence[Row], parts: Sequence[Part]) -> list[KV]:
        if not parts:
            self._forward.run(rows)
            return []
        k, v = self._forward.capture(rows)
        begins = [0]
        for row in rows:
            begins.append(begins[-1] + len(row.tokens))
        results = []
        for part in parts:
            offset = begins[part.row] - rows[part.row].start
            inside = slice(offset + part.start, offset + part.end)
            # [layers, tokens, heads, dim] -> [heads, layers, tokens, dim]
            results.append((k[:, inside].permute(2, 0, 1, 3), v[:, inside].permute(2, 0, 1, 3)))
        return results


def _reads_what_the_backend_wrote(forward: SparseForward, caches: PagedCaches) -> bool:
    """Whether rows written by vLLM's backend are where the kernel would look for them."""
    layer, size = forward.layers[0], caches.block_size
    # Block 0 is never used; the others are not in use yet.
    blocks, tokens = [2, 1], size + 1
    k, v = (
        torch.randn(tokens, layer.num_kv_heads, dim, device=forward.device).to(caches.layers[0].dtype)
        for dim in (layer.head_size, layer.head_size_v)
    )
    slots = forward.slots(torch.arange(tokens, device=forward.device), [blocks])
    for each in forward.layers:
        forward.write(each, k, v, slots)
    shape = (layer.num_kv_heads, len(caches.layers) * tokens * caches.layers[0].shape[-1])
    move = Move(torch.empty(shape, dtype=k.dtype, device=forward.device), tokens, 0, 0)
    gather_reference([move], caches, blocks)
    ours = _split(move, caches)
    same = all(
        torch.equal(mine[:, index], theirs.transpose(0, 1))
        for index in range(len(caches.layers))
        for mine, theirs in zip(ours, (k, v), strict=True)
    )
    if not same:
        logger.warning("this attention backend packs its cache; chunks are copied by its own writer, which is slower")
    return same


def _split(move: Move, caches: PagedCaches) -> KV:
    """K and V of an entry's data that has all tokens of all layers."""
    layered = move.data.view(len(move.data), len(caches.layers), -1)
    split, shape = move.tokens * caches.k_dim, (*layered.shape[:2], move.tokens)
    return layered[..., :split].view(*shape, caches.k_dim), layered[..., split:].view(*shape, caches.v_dim)


def _readable(data: torch.Tensor) -> torch.Tensor:
    """GPUs read pinned host memory directly; other host memory has to be copied first."""
    return data if data.is_cuda or data.is_pinned() else data.pin_memory().cuda(non_blocking=True)
