"""The chunk cache of an engine: looks chunks up, has missing ones filled, stores them."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey, content_hash
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.store import ChunkStorageManager, open_store

logger = logging.getLogger(__name__)

Fill = Callable[[Sequence[int], Sequence[Sequence[int]], int], list[tuple[torch.Tensor, torch.Tensor]]]
"""``fill(context, chunks, length)``: K and V ``[heads, layers, tokens, dim]`` of each chunk, computed alone,
for use in a prompt of ``length`` tokens."""


class Found(NamedTuple):
    """A chunk's entry and how it was come by."""

    entry: ChunkKV
    tier: str | None
    """The tier that had it; ``None`` when it was filled just now."""
    reason: str | None
    """Why no tier had it, when it was filled."""


class ChunkCache:
    """Entries of one model, one format and one tenant. The engine lends it the means to fill."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        model: str,
        fingerprint: Callable[[int], str],
        sink: Sequence[int],
        parser: ChunkTokenParser,
        fill: Fill,
    ) -> None:
        self.store: ChunkStorageManager = open_store(config)
        self.sink = tuple(sink)
        self._config = config
        self._model = model
        self._fingerprint = fingerprint
        self._parser = parser
        self._fill = fill

    def key(self, tokens: Sequence[int], context: Sequence[int], length: int) -> ChunkKey:
        """The key of a chunk computed after ``context`` for prompts like one of ``length`` tokens."""
        digest = content_hash(tokens, context, self._config.chunk_hash_algorithm)
        return ChunkKey(digest, len(tokens), self._model, self._fingerprint(length), self._config.tenant)

    def find_or_fill(self, chunks: Sequence[Sequence[int]], context: Sequence[int], length: int) -> list[Found]:
        """An entry for every chunk of a prompt of ``length`` tokens. Missing ones are filled together and
        stored; a repeated one is filled once."""
        found: dict[tuple[int, ...], Found] = {}
        missing: dict[tuple[int, ...], str] = {}
        for chunk in map(tuple, chunks):
            if chunk in found or chunk in missing:
                continue
            result = self.store.lookup(self.key(chunk, context, length), chunk, context)
            if result.entry is not None:
                found[chunk] = Found(result.entry, result.tier, None)
            else:
                missing[chunk] = result.reason.value if result.reason else "new"
        if missing:
            filled = self._fill(context, list(missing), length)
            for (chunk, reason), (k, v) in zip(missing.items(), filled, strict=True):
                entry = ChunkKV.from_kv(self.key(chunk, context, length), chunk, context, k.cpu(), v.cpu())
                self.store.put(entry)
                found[chunk] = Found(entry, None, reason)
        return [found[tuple(chunk)] for chunk in chunks]

    def warm(self, documents: Iterable[str]) -> int:
        """Fill and store these documents ahead of time, each as a chunk; returns how many were new."""
        if self._config.chunk_context == "system":
            logger.warning("chunk_context=system: entries depend on the system prompt, documents cannot be warmed")
            return 0
        new = 0
        for tokens in map(self._parser.document_tokens, documents):
            [found] = self.find_or_fill([tokens], self.sink, len(self.sink) + len(tokens))
            new += found.tier is None
        return new

    def get_stats(self) -> dict[str, Any]:
        """Counters of the store since start: ``hit_rate, total_chunks, current_memory_mb, cache_hits, …``."""
        return self.store.get_stats()

    def clear(self) -> None:
        """Drop this model's and tenant's entries from every tier; others in a shared directory stay."""
        self.store.clear(lambda key: (key.model, key.tenant) == (self._model, self._config.tenant))

    def close(self) -> None:
        """Finish pending writes and let go of the tiers."""
        self.store.close()
