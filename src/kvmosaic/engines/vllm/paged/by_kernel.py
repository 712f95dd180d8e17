"""Entries into vLLM's blocks and out of them by our own kernels."""

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvmosaic.blend.base import Part as KVPart
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.window import WindowTails
from kvmosaic.engines.rotary import LayerRotary
from kvmosaic.engines.vllm.compat import paged_cache
from kvmosaic.engines.vllm.forward.layer_arrivals import GROUPS, Arrivals
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.rotary import VllmTable
from kvmosaic.engines.vllm.forward.runs import Row
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.paged.base import KV, Part, RequestBlocks
from kvmosaic.kernels.paged import Move, PagedCaches, gather, gather_reference, scatter, scatter_slowly

logger = logging.getLogger(__name__)


class KernelBlocks(RequestBlocks):
    """With one kernel launch for everything. Needs a GPU and a cache that is what it looks like."""

    def __init__(self, forward: SparseForward, caches: PagedCaches, tails: WindowTails) -> None:
        self._forward = forward
        self.tails = tails
        self._caches = caches
        # Where layers share a cache, the first of them has to wait for what the last brings.
        is_shared = len({layer.data_ptr() for layer in caches.layers}) < len(caches.layers)
        self._arrivals = forward.arrivals = Arrivals(forward.device, 1 if is_shared else GROUPS, len(caches.layers))
        self._being_read: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()
        """Host memory that the GPU was told to read. Its allocator does not know, and would hand it out again."""

    @classmethod
    def open(
        cls, forward: SparseForward, rotary: Sequence[LayerRotary | None], tails: WindowTails, ranks: Ranks
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
        if not _reads_what_the_backend_wrote(forward, caches):
            return None
        forward.use_tiles(ranks)
        return cls(forward, caches, tails)

    def place(
        self, moves: Sequence[tuple[ChunkKV, int]], blocks: Sequence[Sequence[int]], first: int
    ) -> torch.cuda.Event | None:
        every = [Move(_readable(entry.data), len(entry.tokens), entry.first_position, at) for entry, at in moves]
        # What is on the GPU already may be overwritten by what its stream does next, so it is read in that order.
        scatter([move for move in every if move.data.is_cuda], self._caches, blocks[0], first, self.tails)
        while self._being_read and self._being_read[0][0].query():
            self._being_read.popleft()
        from_host = [move for move in every if not move.data.is_cuda]
        if not from_host:
            return None
        over = self._arrivals.follow(
            scatter_slowly(from_host, self._caches, blocks[0], first, self.tails, self._arrivals.groups)
        )
        self._being_read.append((over, [move.data for move in from_host]))
        return over

    def compute(self, rows: Sequence[Row], parts: Sequence[Part]) -> list[KV]:
        self._forward.run(rows)
        if not parts:
            return []
        self._arrivals.wait_for_all()
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

    def reused(
        self,
        moves: Sequence[tuple[ChunkKV, int]],
        blocks: Sequence[Sequence[int]],
        layers: Sequence[int],
        part: KVPart,
    ) -> Iterator[torch.Tensor]:
        size = self._caches.block_size
        positions = np.concatenate([np.arange(at, at + len(entry.tokens)) for entry, at in moves])
        ids = np.asarray(blocks[0], dtype=np.int64)[positions // size]
        block, slot = torch.from_numpy(np.stack([ids, positions % size])).to(self._forward.device)
        columns = slice(0, self._caches.k_dim) if part == "k" else slice(self._caches.k_dim, None)
        for layer in layers:
            self._arrivals.wait(layer)
            yield self._caches.layers[layer][..., columns][block, :, slot].transpose(0, 1)

    @property
    def can_read(self) -> bool:
        return True

    def read(self, blocks: Sequence[int], start: int, end: int) -> KV:
        self._arrivals.wait_for_all()
        move = self._room(start, end - start)
        gather([move], self._caches, blocks)
        return _split(move, self._caches)

    def _room(self, position: int, tokens: int) -> Move:
        """Room for so many tokens of what stands at ``position``."""
        cache = self._caches.layers[0]
        shape = (self._forward.layers[0].num_kv_heads, len(self._caches.layers) * tokens * cache.shape[-1])
        return Move(torch.empty(shape, dtype=cache.dtype, device=self._forward.device), tokens, 0, position)


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
