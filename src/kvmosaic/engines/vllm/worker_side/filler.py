"""Computes missing chunks, and stores them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat

import torch

from kvmosaic.core.entry import ChunkKV, PackedKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.window import WHOLE
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.vllm.forward.images import SequenceImages
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.messages import Adapter, ChunkFill, FillSlice, Images, adapter_id
from kvmosaic.engines.vllm.paged.base import RequestBlocks, RunRange
from kvmosaic.engines.vllm.shape import EngineShape
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.adapters import LoadedAdapters
from kvmosaic.engines.vllm.worker_side.images import LoadImages

logger = logging.getLogger(__name__)


@dataclass
class _HalfFilled:
    """A chunk that is filled in several steps."""

    digest: bytes
    tokens: list[int] = field(default_factory=list)
    """Tokens of its context and its own that are computed or placed."""
    pieces: list[PackedKV] = field(default_factory=list)
    """Its KV until now, if blocks do not hold it as it was computed."""


class ChunkFiller:
    """Fills chunks in blocks that it is given. All ranks do the same."""

    def __init__(
        self,
        cache: ChunkCache,
        paged: RequestBlocks,
        shape: EngineShape,
        ranks: Ranks,
        timer: StageTimer,
        stats: ChunkStats,
        adapters: LoadedAdapters,
        images: LoadImages,
        sink: ChunkKV | None = None,
    ) -> None:
        """``sink``: the learned sink that all chunks are filled after, if there is one."""
        self._sink = sink
        self._half_filled: _HalfFilled | None = None
        self._slice_images: tuple[bytes, SequenceImages | None] | None = None  # of the chunk with that digest
        self._ended: set[bytes] = set()
        self._cache = cache
        self._shape = shape
        self._paged = paged
        self._ranks = ranks
        self._timer = timer
        self._stats = stats
        self._adapters = adapters
        self._images = images

    def fill(
        self,
        chunks: Mapping[ChunkKey, Sequence[int]],
        context: Sequence[int],
        blocks: Sequence[Sequence[int]],
        adapter: Adapter | None = None,
        images: Mapping[ChunkKey, Images] | None = None,
    ) -> dict[ChunkKey, ChunkKV]:
        """Compute the entries of ``chunks`` after ``context``, in ``blocks`` with room for any one of them, and store
        them. ``adapter``: the adapter that they are computed with, which can be used; ``images``: chunks with
        images."""
        once, each = (0, 0) if self._sink is not None else self._shape.fill_shares(len(context))
        with self._timer.stage("fill", once + sum(each + len(tokens) for tokens in chunks.values())):
            form, tokens = self._cache.document_format, list(chunks.values())
            pictured = [self._images.sequence(images.get(key), len(context)) for key in chunks] if images else []
            computed = self._paged.fill(context, tokens, blocks, form, self._sink, adapter_id(adapter), pictured)
            entries = {
                key: self._stored(key, tokens, context, packed)
                for (key, tokens), packed in zip(chunks.items(), computed, strict=True)
            }
        self._count(len(chunks), sum(map(len, chunks.values())))
        return entries

    def forget(self) -> None:
        """Discard a chunk that is partly filled, because its weights have changed."""
        self._half_filled = self._slice_images = None

    def take_ended(self) -> frozenset[bytes]:
        """Content hashes of chunks whose filling in the background has ended since the last call, in whatever way."""
        ended, self._ended = self._ended, set()
        return frozenset(ended)

    def fill_in_background(self, fills: Sequence[ChunkFill], part: FillSlice | None, *, can_store: bool) -> None:
        """Fill missing chunks, and a part of one that takes several steps. Those of adapters that have changed since
        this was planned are dropped, and so are all unless the cache ``can_store`` them."""
        self._ended |= {digest for fill in fills for digest, _ in fill.chunks}
        if part is not None and part.is_last:
            self._ended.add(part.digest)
        if not can_store:
            return
        if part is not None and not self._adapters.can_use(part.adapter):
            self.forget()
            if part.is_last:
                self._stats.count_alike("dropped_fills", "")
        elif part is not None and not self._ranks.together(
            partial(self._fill_slice, part), "filling a part of a chunk"
        ):
            self.forget()
            self._stats.failed("fill")
        for fill in fills:
            if not self._adapters.can_use(fill.adapter):
                self._stats.count_alike("dropped_fills", "", len(fill.chunks))
            elif self._ranks.together(partial(self._fill_one, fill), "filling chunks in the background") is None:
                self._stats.failed("fill")

    def _fill_one(self, fill: ChunkFill) -> dict[ChunkKey, ChunkKV]:
        chunks: dict[ChunkKey, Sequence[int]] = {}
        images: dict[ChunkKey, Images] = {}
        for (digest, tokens), inside in zip(fill.chunks, fill.images or repeat(None), strict=False):
            key = self._cache.key_of_hash(digest, len(tokens))
            chunks[key] = tokens
            if inside is not None:
                images[key] = inside
        return self.fill(chunks, fill.context, fill.blocks, fill.adapter, images)

    def _fill_slice(self, part: FillSlice) -> bool:
        """Compute a part of a chunk, and store the chunk after its last part. Always returns true: it was done."""
        placed = len(self._sink.tokens) if self._sink is not None else 0
        if self._sink is not None and part.start == placed:
            self._paged.place([(self._sink, 0)], part.blocks, 0)
        if part.start == placed or self._slice_images is None or self._slice_images[0] != part.digest:
            self._slice_images = part.digest, self._images.sequence(part.images, part.context_tokens)
        _, images = self._slice_images  # what earlier steps encoded is still there
        run = Run(part.tokens, part.start, part.blocks, adapter_id(part.adapter), images, part.following)
        first = max(part.start, part.context_tokens)
        captures = not self._paged.holds_computed and run.end > first
        with self._timer.stage("fill", len(part.tokens)):
            # All ranks have to compute it, including a rank that failed in an earlier step and will store nothing.
            # Exactly, and with all tokens: pieces have to be joined before anything is left out or rounded.
            whole = replace(self._paged.format, tails=WHOLE)
            computed = self._paged.compute([run], [RunRange(0, first, run.end)] if captures else [], whole)
        if part.start == placed:
            self._half_filled = _HalfFilled(part.digest, list(self._cache.sink[:placed]))
        half = self._half_filled
        if half is None or half.digest != part.digest or len(half.tokens) != part.start:
            return True
        half.tokens += part.tokens
        half.pieces += computed
        if not part.is_last:
            return True
        self._half_filled = self._slice_images = None
        form = self._cache.document_format
        if self._paged.holds_computed:
            packed = self._paged.read(part.blocks[0], part.context_tokens, run.end, form)
        else:
            pieces = zip(*(piece.layers() for piece in half.pieces), strict=True)
            k, v = (torch.cat(rows, dim=2) for rows in pieces)
            packed = PackedKV.of(k, v, form)
        context, tokens = half.tokens[: part.context_tokens], half.tokens[part.context_tokens :]
        self._stored(self._cache.key_of_hash(part.digest, len(tokens)), tokens, context, packed)
        self._count(1, len(tokens))
        return True

    def _count(self, chunks: int, tokens: int) -> None:
        self._stats.count_alike("chunks_filled", "", chunks)
        self._stats.count_alike("tokens", "filled", tokens)

    def _stored(self, key: ChunkKey, tokens: Sequence[int], context: Sequence[int], packed: PackedKV) -> ChunkKV:
        """The entry, which is also stored if the store accepts it."""
        entry = ChunkKV.from_packed(key, tokens, context, packed, "document")
        try:
            self._cache.put(entry)
        except Exception:
            logger.exception("could not store a chunk of %d tokens", len(tokens))
            self._stats.failed("store")
        return entry
