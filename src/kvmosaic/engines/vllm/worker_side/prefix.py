"""Worker side of exact prefix blocks: KV that vLLM computed, into the store and back to where it was."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.rotary import ANY_LENGTH
from kvmosaic.engines.vllm.forward.runs import Row
from kvmosaic.engines.vllm.messages import PrefixLoad, PrefixSave
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer

logger = logging.getLogger(__name__)


class PrefixLoader:
    """Moves exact prefix blocks between requests' blocks and the store. All ranks do the same."""

    def __init__(
        self, cache: ChunkCache, blocks: RequestBlocks, ranks: Ranks, timer: StageTimer, stats: ChunkStats
    ) -> None:
        self._cache = cache
        self._blocks = blocks
        self._ranks = ranks
        self._timer = timer
        self._stats = stats

    def save(self, saves: Sequence[PrefixSave]) -> None:
        """Store what requests computed. What cannot be stored is computed again by whoever needs it."""
        if not self._blocks.can_read:
            return
        try:
            for save in saves:
                for start, digest in save.parts:
                    end = start + save.part
                    k, v = self._blocks.read(save.blocks, start, end)
                    key = self._cache.key_of_hash(digest, save.part, ANY_LENGTH)
                    self._cache.put(key, save.tokens[start:end], save.tokens[:start], k, v)
                    self._count("saved", save.part)
        except Exception:
            logger.exception("could not store exact prefix blocks")

    def load(self, load: PrefixLoad) -> None:
        """Bring positions ``load.first`` up to the end of the tokens into the request's blocks. What the store turns
        out not to have is computed."""
        keys = [self._cache.key_of_hash(digest, load.part, ANY_LENGTH) for digest in load.digests]
        wanted = range(load.first // load.part, len(keys))
        with ExitStack() as pins:
            pins.enter_context(self._cache.store.pin([keys[index] for index in wanted]))
            found: list[tuple[ChunkKV, int]] = []
            try:
                with self._timer.stage("lookup"):
                    found = [(self._entry(load, index, keys[index]), index * load.part) for index in wanted]
            except LookupError:
                pass
            except Exception:
                logger.exception("could not look up a prefix of %d tokens", len(load.tokens))
            is_placed = False
            if self._ranks.all_have([bool(found)])[0]:
                try:
                    with self._timer.stage("remap", len(load.tokens) - load.first) as remap:
                        remap.end = self._blocks.place(found, load.blocks, load.first)
                    is_placed = True
                except Exception:
                    logger.exception("could not load a prefix of %d tokens; it is computed", len(load.tokens))
            if self._ranks.all_have([is_placed])[0]:
                self._count("loaded", len(load.tokens) - load.first)
                return
        # Blocks that vLLM's prefix cache has of a part may lack what tokens behind them see in sliding windows.
        first = load.first // load.part * load.part if self._blocks.tails.cuts(load.part) else load.first
        self._blocks.compute([Row(load.tokens[first:], first, load.blocks)], [])
        self._count("fresh", len(load.tokens) - load.first)

    def _entry(self, load: PrefixLoad, index: int, key: ChunkKey) -> ChunkKV:
        start = index * load.part
        tokens, context = load.tokens[start : start + load.part], load.tokens[:start]
        entry = self._cache.store.lookup(key, tokens, context, False).entry
        if entry is None:
            raise LookupError
        return entry

    def _count(self, kind: str, tokens: int) -> None:
        if self._ranks.rank == 0:
            self._stats.count("tokens", kind, tokens)
