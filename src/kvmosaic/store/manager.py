"""The store as engines see it: one place to put entries and to find them again."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, LookupResult, MissReason, Tier
from kvmosaic.store.stack import TierStack
from kvmosaic.store.tiers.host import in_pinned_memory

FETCHES_REMEMBERED = 10_000


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
        self._fetched_from: dict[ChunkKey, str] = {}

    def absent(self, keys: Iterable[ChunkKey]) -> Collection[tuple[int, ChunkKey]]:
        """Ask tiers on other machines about all ``keys`` in one go: what the lookups that follow need not ask for."""
        return self._stack.absent(list(keys))

    def lookup(
        self,
        key: ChunkKey,
        tokens: Sequence[int],
        context: Sequence[int],
        counted: bool = True,
        absent: Collection[tuple[int, ChunkKey]] = (),
    ) -> LookupResult:
        """Find the entry of ``key`` and check that it is the KV of ``tokens`` computed after ``context``. Hits and
        misses that are not ``counted`` stay out of the statistics; ``absent`` is from :meth:`absent`."""
        reason = None
        clears = self._stack.clears
        for level, tier in enumerate(self._stack.tiers):
            if (level, key) in absent:
                continue
            entry, failure = self._stack.read(level, key)
            reason = reason or failure
            if entry is None:
                continue
            if not entry.matches(tokens, context):
                reason = MissReason.COLLISION
                break
            if level > 0:
                self._stack.promote(level, entry, clears)
                entry = self._stack.read(0, key)[0] or entry
            name = self._fetched_from.pop(key, tier.name)
            with self._lock:
                self._hits[name] += counted
                # In all tiers, or the slower ones would evict what is so popular that they never see it.
                for policy in self._stack.policies.values():
                    policy.touch(key)
            return LookupResult(entry, name, None)
        with self._lock:
            if reason is None:
                reason = MissReason.EVICTED if self._stack.index.was_evicted(key) else MissReason.NEW
            self._misses[reason] += counted
        return LookupResult(None, None, reason)

    def fetch(self, keys: Iterable[ChunkKey]) -> None:
        """Bring entries from slower tiers to the fastest one, as far as it has room. Made to be called from a thread
        of its own, ahead of a lookup, which then reports the tier that had them."""
        wanted = dict.fromkeys(key for key in keys if self._stack.size(0, key) is None)
        absent = self._stack.absent(wanted)
        for level, tier in enumerate(self._stack.tiers[1:], start=1):
            clears = self._stack.clears
            asked = [key for key in wanted if (level, key) not in absent]
            for key, entry in self._stack.read_all(level, asked):
                # Pinned first: the promotion holds the lock, and only from pinned memory a copy is just queued.
                moved = in_pinned_memory(entry) if self.fastest_tier == "device" else entry
                self._stack.promote(level, moved, clears)
                del wanted[key]
                self._fetched_from[key] = tier.name
                if len(self._fetched_from) > FETCHES_REMEMBERED:  # some were never looked up
                    self._fetched_from.pop(next(iter(self._fetched_from)), None)

    @property
    def fastest_tier(self) -> str:
        """Name of the tier that lookups and fetches promote to."""
        return self._stack.tiers[0].name

    def event_counts(self) -> Counter[str]:
        """Evictions, promotions, demotions and write errors since the start."""
        return self._stack.counts.copy()

    def held(self) -> dict[str, tuple[int, int]]:
        """By tier that has a budget: how many entries it holds, and their bytes."""
        with self._lock:
            return {name: (len(policy), policy.nbytes) for name, policy in self._stack.policies.items()}

    def contains(self, key: ChunkKey) -> bool:
        """Whether the store has ``key`` right now; reads and verifies nothing."""
        return self._stack.contains(key)

    def lasting(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Which of ``keys`` will still be there when this process is gone, once everything put so far is written."""
        self.flush()
        return self._stack.lasting(list(keys))

    def put(self, entry: ChunkKV) -> bool:
        """Store an entry; a no-op when its key is there already. A tier on another machine is asked later, before
        anything is sent there. Whether at least one tier has it."""
        stack, key = self._stack, entry.key
        if stack.contains(key, far=False):  # of far tiers the writer asks, for which nobody has to wait
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

    def take_changes(self) -> dict[ChunkKey, str | None]:
        """For every key that came, moved or went since the last call (at the first: for all), the fastest tier that
        now has it."""
        index = self._stack.index
        with self._lock:
            changes: dict[ChunkKey, str | None] = dict.fromkeys(index.take_changes())
            for key in changes:
                record = index.lookup(key)
                if record is not None:
                    changes[key] = next(tier.name for tier in self._stack.tiers if tier.name in record.nbytes)
        return changes

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
