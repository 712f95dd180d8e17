"""Lists, pins and deletes stored documents of a rank, for administrators."""

import time
from collections.abc import Iterator
from heapq import nlargest
from typing import Any

from kvmosaic.core.key import ChunkKey
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.vllm.worker_side.fetcher import ChunkFetcher
from kvmosaic.store import EntryInfo

SHOWN_TOKENS = 16
"""Number of a document's first tokens that are shown, by which people recognise it."""


class StoredDocuments:
    """The entries that this rank could serve now: of its model, weights and tenant."""

    def __init__(self, cache: ChunkCache, fetcher: ChunkFetcher) -> None:
        self._cache = cache
        self._fetcher = fetcher

    def listed(self, most: int, *, shows_text: bool) -> dict[str, Any]:
        """Number of entries, their bytes, and the newest ``most``."""
        every = list(self._entries())
        newest = nlargest(most, every, key=lambda info: info.since or 0.0)
        return {
            "entries": len(every),
            "bytes": sum(info.nbytes for info in every),
            "documents": [self._described(info, shows_text) for info in newest],
        }

    def keys(self, digest: str) -> list[ChunkKey]:
        """The keys of a content hash, given by its hexadecimal digits."""
        return [info.key for info in self._entries() if info.key.content_hash.hex() == digest]

    def pin(self, digest: str, *, is_pinned: bool) -> int:
        """Protect entries from eviction, or stop protecting them. Returns their number."""
        keys = self.keys(digest)
        if is_pinned:
            self._cache.store.keep(keys)
        else:
            self._cache.store.let_go(keys)
        return len(keys)

    def let_go_of_outdated(self) -> None:
        """Stop protecting entries that this rank cannot serve any more. Administrators cannot name them."""
        self._cache.store.let_go_of(lambda key: not self._cache.makes(key))

    def delete(self, digest: str) -> int:
        """Delete entries from all tiers. Returns their number."""
        keys = self.keys(digest)
        self._cache.store.remove(keys)
        self._fetcher.forget(keys)
        return len(keys)

    def _entries(self) -> Iterator[EntryInfo]:
        for info in self._cache.store.scan():
            if self._cache.makes(info.key):
                yield info

    def _described(self, info: EntryInfo, shows_text: bool) -> dict[str, Any]:
        described = {
            "hash": info.key.content_hash.hex(),
            "tokens": info.key.num_tokens,
            "bytes": info.nbytes,
            "tier": info.tier,
            "age_s": None if info.since is None else round(max(0.0, time.time() - info.since), 1),
            "hits": info.hits,
            "kind": info.kind,
            "pinned": info.pinned,
        }
        if shows_text:
            entry = self._cache.store.peek(info.key)  # not from slower tiers: other requests would wait for them
            described["first_tokens"] = None if entry is None else list(entry.tokens[:SHOWN_TOKENS])
        return described
