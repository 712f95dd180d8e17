"""Worker side of exact prefix blocks: saves KV that vLLM computed to the store, and loads it back at the same
positions."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from kvmosaic.core.accelerator import free_unused_memory
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.messages import PrefixLoad, PrefixSave
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.fetcher import ChunkFetcher

logger = logging.getLogger(__name__)


class PrefixLoader:
    """Moves exact prefix blocks between requests' blocks and the store. All ranks do the same."""

    def __init__(
        self,
        cache: ChunkCache,
        fetcher: ChunkFetcher,
        paged: RequestBlocks,
        ranks: Ranks,
        timer: StageTimer,
        stats: ChunkStats,
    ) -> None:
        self._cache = cache
        self._fetcher = fetcher
        self._paged = paged
        self._ranks = ranks
        self._timer = timer
        self._stats = stats

    def save(self, saves: Sequence[PrefixSave]) -> None:
        """Store segments that requests computed. A segment that cannot be stored is computed again by the next
        request that needs it."""
        if not self._paged.can_read:
            return
        for save in saves:
            self._save(save)

    def _save(self, save: PrefixSave) -> None:
        for start, digest in save.segments:
            try:
                end = start + save.segment_tokens
                packed = self._paged.read(save.blocks, start, end, self._paged.format)
                key = self._cache.key_of_hash(digest, save.segment_tokens, is_exact=True)
                tokens, context = save.tokens[start:end], save.tokens[:start]
                self._cache.put(ChunkKV.from_packed(key, tokens, context, packed, "prefix-part"))
                self._stats.count_alike("tokens", "saved", save.segment_tokens)
            except Exception:  # noqa: PERF203 - the other segments can still be stored
                logger.exception("could not store a segment of an exact prefix")
                self._stats.failed("store")

    def load(self, load: PrefixLoad) -> None:
        """Load positions from ``load.start`` to the end of the tokens into the request's blocks. They are computed if
        the store turns out not to have all of them."""
        keys = [self._cache.key_of_hash(digest, load.segment_tokens, is_exact=True) for digest in load.digests]
        wanted = range(load.start // load.segment_tokens, len(keys))
        with ExitStack() as pins:
            found: list[tuple[ChunkKV, int]] = []
            try:
                pins.enter_context(self._cache.store.pin([keys[index] for index in wanted]))
                with self._timer.stage("lookup"):
                    found = [(self._entry(load, index, keys[index]), index * load.segment_tokens) for index in wanted]
            except LookupError:
                pass
            except Exception:
                logger.exception("could not look up a prefix of %d tokens", len(load.tokens))
                self._stats.failed("lookup")
            is_placed = False
            if self._ranks.all_have([bool(found)])[0]:
                try:
                    with self._timer.stage("remap", len(load.tokens) - load.start) as remap:
                        remap.end = self._paged.place(found, load.blocks, load.start)
                    is_placed = True
                except Exception:
                    logger.exception("could not load a prefix of %d tokens; it is computed", len(load.tokens))
                    self._stats.failed("place")
            if self._ranks.all_have([is_placed])[0]:
                self._stats.count_alike("tokens", "loaded", len(load.tokens) - load.start)
                return
        # A segment's blocks in vLLM's prefix cache may lack KV that tokens behind them see in sliding windows.
        first = (
            load.start // load.segment_tokens * load.segment_tokens
            if self._paged.tails.cuts(load.segment_tokens)
            else load.start
        )
        run = Run(load.tokens[first:], first, load.blocks)
        for _ in range(2):  # a second failure is raised, like a failure of vLLM's own forward
            if self._ranks.together(lambda: self._paged.compute([run], []), "computing a prefix") is not None:
                break
            self._stats.failed("compute")
            free_unused_memory()
        else:
            raise RuntimeError("a prefix could not be computed, twice in a row; the log has the reasons")
        self._stats.count_alike("tokens", "fresh", len(load.tokens) - load.start)

    def _entry(self, load: PrefixLoad, index: int, key: ChunkKey) -> ChunkKV:
        start = index * load.segment_tokens
        tokens, context = load.tokens[start : start + load.segment_tokens], load.tokens[:start]
        held = self._fetcher.kept_for(load.request_id)
        entry = self._cache.store.lookup(key, tokens, context, False, held=held).entry
        if entry is None:
            raise LookupError
        return entry
