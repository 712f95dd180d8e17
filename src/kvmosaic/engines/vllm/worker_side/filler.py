"""Computes chunks that are missing, and stores them."""

import logging
from collections.abc import Mapping, Sequence

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.vllm.messages import ChunkFill
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer

logger = logging.getLogger(__name__)


class ChunkFiller:
    """Fills chunks in blocks that it is given. All ranks do the same."""

    def __init__(self, cache: ChunkCache, paged: RequestBlocks, timer: StageTimer, stats: ChunkStats) -> None:
        self._cache = cache
        self._paged = paged
        self._timer = timer
        self._stats = stats

    def fill(
        self, chunks: Mapping[ChunkKey, Sequence[int]], context: Sequence[int], blocks: Sequence[Sequence[int]]
    ) -> dict[ChunkKey, ChunkKV]:
        """Compute the entries of ``chunks`` after ``context``, in ``blocks`` with room for any one of them, and store
        them."""
        with self._timer.stage("fill"):
            computed = self._paged.fill(context, list(chunks.values()), blocks)
            entries = {
                key: self._cache.put(key, tokens, context, k, v)
                for (key, tokens), (k, v) in zip(chunks.items(), computed, strict=True)
            }
        self._stats.count_alike("chunks_filled", "", len(chunks))
        self._stats.count_alike("tokens", "filled", sum(map(len, chunks.values())))
        return entries

    def fill_in_background(self, fills: Sequence[ChunkFill]) -> None:
        """Fill chunks that requests lacked."""
        for fill in fills:
            chunks = {self._cache.key_of_hash(digest, len(tokens)): tokens for digest, tokens in fill.chunks}
            try:
                self.fill(chunks, fill.context, fill.blocks)
            except Exception:
                logger.exception("could not fill %d chunk(s) in the background", len(chunks))
