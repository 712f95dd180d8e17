"""The store as engines see it: one place to put entries and to find them again."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, LookupResult, MissReason, Tier
from kvmosaic.store.stack import TierStack


class ChunkStorageManager:
    """A stack of tiers, fast to slow, seen as one store of immutable entries. Thread-safe.

    A new entry goes to the fastest tier at once and to the slower ones in the background; one found in
    a slower tier is promoted; one evicted from a tier is demoted to the next unless that has it too.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._stack = TierStack(tiers)
        self._lock = self._stack.lock
        self._hits: Counter[str] = Counter()
        self._misses: Counter[MissReason] = Counter()

    def lookup(self, key: ChunkKey, tokens: Sequence[int], context: Sequence[int]) -> LookupResult:
        """Find the entry of ``key`` and check that it is the KV of ``tokens`` computed after ``context``."""
        reason = None
        for level, tier in enumerate(self._stack.tiers):
            entry, failure = self._stack.read(level, key)
            reason = reason or failure
            if entry is None:
                continue
            if not entry.matches(tokens, context):
                reason = MissReason.COLLISION
                break
            if level > 0:
                self._stack.promote(level, entry)
                entry = self._stack.read(0, key)[0] or entry
            with self._lock:
                self._hits[tier.name] += 1
                # In all tiers, or the slower ones would evict what is so popular that they never see it.
                for policy in self._stack.policies.values():
                    policy.touch(key)
            return LookupResult(entry, tier.name, None)
        with self._lock:
            if reason is None:
                reason = MissReason.EVICTED if self._stack.index.was_evicted(key) else MissReason.NEW
            self._misses[reason] += 1
        return LookupResult(None, None, reason)

    def contains(self, key: ChunkKey) -> bool:
        """Whether the store has ``key`` right now; reads and verifies nothing."""
        return self._stack.contains(key)

    def put(self, entry: ChunkKV) -> bool:
        """Store an entry; a no-op when its key is there. Whether at least one tier has it."""
        stack, key = self._stack, entry.key
        if stack.contains(key):
            return True
        with self._lock:
            if stack.size(0, key) is not None or stack.writer.get(key) is not None:
                return True  # another thread was faster
            taken = stack.place(entry)
            if len(stack.tiers) > 1:
                stack.writer.add(entry, level=1)
        stack.writer.wait_for_room()
        if not taken:
            stack.writer.flush(key)
            taken = stack.index.lookup(key) is not None
        return taken

    @contextmanager
    def pin(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Keep ``keys``, stored already or later, from being evicted inside the ``with`` block."""
        held = list(keys)
        with self._lock:
            self._stack.index.pin(held)
        try:
            yield
        finally:
            with self._lock:
                self._stack.index.unpin(held)

    def scan(self) -> Iterator[EntryInfo]:
        """All entries this process knows of, each with the fastest tier that holds it."""
        index = self._stack.index
        with self._lock:
            records = [(key, dict(record.nbytes), key in index.pins) for key, record in index]
        for key, nbytes, pinned in records:
            tier = next(tier.name for tier in self._stack.tiers if tier.name in nbytes)
            yield EntryInfo(key, nbytes[tier], tier, pinned)

    def clear(self, matching: Callable[[ChunkKey], bool] = lambda key: True) -> None:
        """Remove entries from all tiers, pinned ones too: those whose key is ``matching``, by default all.
        Files that were set aside stay."""
        self._stack.clear(matching)

    def flush(self) -> None:
        """Wait until everything put so far is in the slower tiers, or was refused there."""
        self._stack.writer.flush()

    def close(self) -> None:
        """Write what is queued, then close the tiers."""
        self.flush()
        for tier in self._stack.tiers:
            tier.close()

    def get_stats(self) -> dict[str, Any]:
        """Counters since the start, and what is held now. Sizes in MB of 2**20 bytes."""
        stack = self._stack
        with self._lock:
            hits, misses = self._hits.total(), self._misses.total()
            held_mb = {name: policy.nbytes / 2**20 for name, policy in stack.policies.items()}
            return {
                "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
                "total_chunks": len(stack.index),
                "current_memory_mb": held_mb.get("host", 0.0),
                "device_mb": held_mb.get("device", 0.0),
                "disk_mb": held_mb.get("disk", 0.0),
                "cache_hits": hits,
                "cache_misses": misses,
                "hits_by_tier": {tier.name: self._hits[tier.name] for tier in stack.tiers},
                "misses_by_reason": {reason.value: self._misses[reason] for reason in MissReason},
                **{name: stack.counts[name] for name in ("evictions", "promotions", "demotions", "write_errors")},
                "corrupt_set_aside": sum(tier.set_aside for tier in stack.tiers),
                "pinned": len(stack.index.pins),
            }
