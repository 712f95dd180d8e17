"""Copying entries into vLLM's blocks and out of them with our own kernels."""

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvmosaic.blend.base import KVPart
from kvmosaic.core.entry import ChunkKV, KVFormat, PackedKV
from kvmosaic.core.window import WHOLE
from kvmosaic.engines.rotary import LayerRotary
from kvmosaic.engines.vllm.forward.kv_layers import KVLayers
from kvmosaic.engines.vllm.forward.layer_arrivals import LayerArrivals
from kvmosaic.engines.vllm.forward.rotary import VllmTable
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.paged.base import RequestBlocks, RunRange
from kvmosaic.kernels.paged import Move, PagedCaches, gather, gather_reference, scatter, scatter_slowly

logger = logging.getLogger(__name__)


def readable_caches(kv: KVLayers) -> PagedCaches | None:
    """The caches of all layers, for our kernels; ``None`` if the backend packs or quantises its cache, or without a
    GPU. To be called before any block is in use."""
    if kv.device.type != "cuda":
        return None
    layers, first = [layer.cache for layer in kv.kept], kv.layers[0]
    if (
        len(kv.block_sizes) > 1
        or len({(layer.shape, layer.stride(), layer.dtype) for layer in layers}) > 1
        or layers[0].dtype not in (torch.float32, torch.float16, torch.bfloat16)
        or layers[0].shape[1:] != (first.kv_heads, kv.block_sizes[0], first.k_dim + first.v_dim)
    ):
        return None
    caches = PagedCaches(layers, first.k_dim, [None] * len(layers), None)
    return caches if _reads_what_the_backend_wrote(kv, caches) else None


class KernelBlocks(RequestBlocks):
    """Uses our kernels: one launch for all layers and entries, or one for each group of layers from host memory."""

    def __init__(
        self, forward: SparseForward, caches: PagedCaches, arrivals: LayerArrivals, kv_format: KVFormat
    ) -> None:
        self.format = kv_format
        self._forward = forward
        self._caches = caches
        self._arrivals = arrivals
        self._being_read: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()
        """Host memory that the GPU is reading. Its allocator does not know of these reads, and would reuse the
        memory."""

    @classmethod
    def open(
        cls,
        forward: SparseForward,
        caches: PagedCaches,
        arrivals: LayerArrivals,
        rotary: Sequence[LayerRotary | None],
        kv_format: KVFormat,
    ) -> "KernelBlocks | None":
        """``None`` if keys rotate in a way that the kernel does not support."""
        columns = {layer.columns for layer in rotary if layer}
        if len(columns) > 1:
            return None
        tables = [layer.table.tensor if layer and isinstance(layer.table, VllmTable) else None for layer in rotary]
        turning = replace(caches, tables=tables, columns=next(iter(columns), None))
        return cls(forward, turning, arrivals, kv_format)

    def place(
        self, moves: Sequence[tuple[ChunkKV, int]], blocks: Sequence[Sequence[int]], start: int
    ) -> torch.cuda.Event | None:
        self.check_formats(moves)
        every = [Move(_readable(entry.data), len(entry.tokens), entry.first_position, at) for entry, at in moves]
        # Entries on the GPU may be overwritten by later work of the engine's stream, so they are read on that stream.
        scatter([move for move in every if move.data.is_cuda], self._caches, blocks[0], start, self.tails)
        while self._being_read and self._being_read[0][0].query():
            self._being_read.popleft()
        from_host = [move for move in every if not move.data.is_cuda]
        if not from_host:
            return None
        over = self._arrivals.follow(
            scatter_slowly(from_host, self._caches, blocks[0], start, self.tails, self._arrivals.groups)
        )
        self._being_read.append((over, [move.data for move in from_host]))
        return over

    def compute(
        self, runs: Sequence[Run], ranges: Sequence[RunRange] = (), form: KVFormat | None = None
    ) -> list[PackedKV]:
        self._forward.run(runs)
        if not ranges:
            return []
        self._arrivals.wait_for_all()
        size = self._caches.block_size
        # The blocks of all requested runs, one after the other, as if they were one sequence.
        blocks: list[int] = []
        begins = {}
        for index in sorted({each.run for each in ranges}):
            begins[index] = len(blocks) * size
            blocks += runs[index].blocks[0][: -(-runs[index].end // size)]
        form = form or self.format
        moves = [
            _room(form, self._forward.kv, each.end - each.start, begins[each.run] + each.start) for each in ranges
        ]
        gather(moves, self._caches, blocks, form.tails)
        return [PackedKV(move.data, form, move.tokens) for move in moves]

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
        block, slot = torch.from_numpy(np.stack([ids, positions % size])).to(self._forward.kv.device)
        columns = slice(0, self._caches.k_dim) if part == "k" else slice(self._caches.k_dim, None)
        for layer in layers:
            self._arrivals.wait(layer)
            yield self._caches.layers[layer][..., columns][block, :, slot].transpose(0, 1)

    @property
    def can_read(self) -> bool:
        return True

    def read(self, blocks: Sequence[int], start: int, end: int, form: KVFormat) -> PackedKV:
        self._arrivals.wait_for_all()
        move = _room(form, self._forward.kv, end - start, start)
        gather([move], self._caches, blocks, form.tails)
        return PackedKV(move.data, form, move.tokens)


def _room(form: KVFormat, kv: KVLayers, tokens: int, position: int) -> Move:
    """A buffer for ``tokens`` from ``position`` on."""
    # Scales have places that the kernel does not write, and equal entries have to have equal bytes.
    make = torch.zeros if form.is_int8 else torch.empty
    data = make((form.heads, form.num_elements(tokens)), dtype=form.stored_dtype, device=kv.device)
    return Move(data, tokens, 0, position)


def _reads_what_the_backend_wrote(kv: KVLayers, caches: PagedCaches) -> bool:
    """Whether rows written by vLLM's backend are where the kernel would look for them."""
    layer, size = kv.layers[0], caches.block_size
    # Block 0 is never used; the others are not in use yet.
    blocks, tokens = [2, 1], size + 1
    k, v = (
        torch.randn(tokens, layer.kv_heads, dim, device=kv.device).to(caches.layers[0].dtype)
        for dim in (layer.k_dim, layer.v_dim)
    )
    slots = kv.slots(torch.arange(tokens, device=kv.device), [blocks])
    for each in kv.kept:
        kv.write(each, k, v, slots)
    form = caches.format(WHOLE, is_int8=False)
    move = _room(form, kv, tokens, 0)
    gather_reference([move], caches, blocks)
    ours = PackedKV(move.data, form, tokens).layers()
    is_same = all(
        torch.equal(mine[:, index], theirs.transpose(0, 1))
        for index in range(len(caches.layers))
        for mine, theirs in zip(ours, (k, v), strict=True)
    )
    if not is_same:
        logger.warning("this attention backend packs its cache; chunks are copied by its own writer, which is slower")
    return is_same


def _readable(data: torch.Tensor) -> torch.Tensor:
    """GPUs read pinned host memory directly; other host memory has to be copied first."""
    return data if data.is_cuda or data.is_pinned() else data.pin_memory().cuda(non_blocking=True)
