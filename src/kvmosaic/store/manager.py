"""The store as engines see it: one place to put entries and to find them again."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, Fetched, LookupResult, MissReason, Tier
from kvmosaic.store.due_clears import OneOf
from kvmosaic.store.stack import TierStack
from kvmosaic.store.tiers.host import in_pinned_memory

logger = logging.getLogger(__name__)

FETCHES_REMEMBERED = 10_000
EVENTS = ("evictions", "promotions", "demotions", "write_errors", "dropped_writes")


class ChunkStorageManager:
    """A stack of tiers, fast to slow, seen as one store of immutable entries. Thread-safe.

    A new entry goes to the fastest tier at once and to the slower ones in the background. An entry found in a slower
    tier is promoted. An entry evicted from a tier is demoted to the next one, unless that already has it.
    """

    def __init__(self, tiers: Sequence[Tier], kv_format: KVFormat | None = None) -> None:
        """``kv_format``, if given, is the format of all entries that the store takes and returns."""
        self._stack = TierStack(tiers, kv_format)
        self._known = self._stack.known
        self._lock = self._stack.lock
        self._hits: Counter[str] = Counter()
        self._misses: Counter[MissReason] = Counter()
        self._fetched_from: dict[ChunkKey, str] = {}
        self._kept: set[ChunkKey] = set()

    def absent(self, keys: Iterable[ChunkKey]) -> Collection[tuple[int, ChunkKey]]:
        """Ask slow tiers about all ``keys`` at once, so that the following lookups need not."""
        return self._known.absent(list(keys))

    def lookup(
        self,
        key: ChunkKey,
        tokens: Sequence[int],
        context: Sequence[int],
        counted: bool = True,
        absent: Collection[tuple[int, ChunkKey]] = (),
        held: Mapping[ChunkKey, Fetched] | None = None,
    ) -> LookupResult:
        """Find the entry of ``key`` and check that it is the KV of ``tokens`` computed after ``context``. Hits and
        misses that are not ``counted`` stay out of the statistics. ``absent`` is from :meth:`absent`. If ``held``,
        the entries that were fetched ahead, is given, slow tiers are not read, so that the caller does not wait."""
        reason = None
        clears = self._known.due.count
        for level, tier in enumerate(self._stack.tiers):
            if (level, key) in absent or (held is not None and tier.is_slow):
                continue
            entry, failure = self._known.read(level, key)
            reason = reason or failure
            if entry is None:
                continue
            if not entry.matches(tokens, context):
                reason = MissReason.COLLISION
                break
            if level > 0:
                self._stack.promote(level, entry, clears)
                entry = self._known.read(0, key)[0] or entry
            return self._found(entry, tier.name, counted)
        fetched = None if held is None else held.get(key)
        if fetched is not None and fetched.entry.matches(tokens, context):
            return self._found(fetched.entry, fetched.tier, counted)
        with self._lock:
            if reason is None and held is not None and self._known.index.lookup(key) is not None:
                reason = MissReason.SLOW
            if reason is None:
                reason = self._why_absent(key)
            self._misses[reason] += counted
        return LookupResult(None, None, reason)

    def note_miss(self, key: ChunkKey) -> MissReason:
        """Count a miss of ``key`` without a lookup. The caller already knows that it is absent."""
        with self._lock:
            reason = self._why_absent(key)
            self._misses[reason] += 1
        return reason

    def _why_absent(self, key: ChunkKey) -> MissReason:
        return MissReason.EVICTED if self._known.index.was_evicted(key) else MissReason.NEW

    def _found(self, entry: ChunkKV, tier: str, counted: bool) -> LookupResult:
        with self._lock:
            name = self._fetched_from.pop(entry.key, tier)
            self._hits[name] += counted
            self._stack.index.describe(entry.key, entry.kind, hits=counted)
            # In all tiers: otherwise the slower ones would evict popular entries, whose lookups never reach them.
            for policy in self._stack.policies.values():
                policy.touch(entry.key)
        return LookupResult(entry, name, None)

    def fetch(self, keys: Iterable[ChunkKey]) -> None:
        """Bring entries from slower tiers to the fastest one, as far as it has room."""
        for _ in self.fetch_each(keys):
            pass

    def fetch_each(self, keys: Iterable[ChunkKey]) -> Iterator[Fetched]:
        """Like :meth:`fetch`, but each entry is brought when the iterator is asked for it. Meant for a thread of its
        own, ahead of a lookup. The lookup then reports the tier that had the entry."""
        wanted = dict.fromkeys(key for key in keys if not self.is_near(key))
        absent = self._known.absent(wanted)
        for level, tier in enumerate(self._stack.tiers[1:], start=1):
            clears = self._known.due.count
            asked = [key for key in wanted if (level, key) not in absent]
            for key, entry in self._known.read_all(level, asked):
                # Into pinned memory first: the promotion holds the lock, and only from there copies are asynchronous.
                moved = in_pinned_memory(entry) if self.fastest_tier == "device" else entry
                self._stack.promote(level, moved, clears)
                del wanted[key]
                with self._lock:
                    self._fetched_from[key] = tier.name
                    if len(self._fetched_from) > FETCHES_REMEMBERED:  # some were never looked up
                        del self._fetched_from[next(iter(self._fetched_from))]
                yield Fetched(moved, tier.name, self.is_near(key))

    def is_near(self, key: ChunkKey) -> bool:
        """Whether the fastest tier has ``key``."""
        return self._known.size(0, key) is not None

    @property
    def fastest_tier(self) -> str:
        """Name of the tier that lookups and fetches promote to."""
        return self._stack.tiers[0].name

    @property
    def has_company(self) -> bool:
        """Whether another process was seen to write to the disk that this one writes to."""
        return self._known.has_company

    def event_counts(self) -> Counter[str]:
        """Evictions, promotions, demotions, write errors and dropped writes since the start."""
        return self._stack.counts.copy()

    def held(self) -> dict[str, tuple[int, int]]:
        """Number of entries and their bytes, by name of each tier that has a budget."""
        with self._lock:
            return {name: (len(policy), policy.nbytes) for name, policy in self._stack.policies.items()}

    def contains(self, key: ChunkKey) -> bool:
        """Whether the store has ``key`` right now; reads and verifies nothing."""
        return self._stack.contains(key)

    def lasting(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those of ``keys`` that will outlive this process. Waits until everything put so far is written."""
        self.flush()
        return self._known.lasting(list(keys))

    def put(self, entry: ChunkKV) -> bool:
        """Store an entry; does nothing if its key is stored already. Never waits for a slow tier: the entry is
        written there later, or dropped if too much is queued. Returns whether a tier has it, or is about to get it if
        the fastest had no room. :meth:`lasting` tells whether it outlives the process."""
        stack = self._stack
        if not self._known.takes(entry):
            logger.error("entry not stored, its format differs from the store's: %s", entry.format)
            return False
        with self._lock:
            if stack.contains(entry.key, far=False):
                return True
            taken = stack.place(entry)
            stack.index.describe(entry.key, entry.kind)
            below = len(stack.tiers) > 1 and (taken or stack.can_hold(entry))
            queued = below and stack.enqueue(entry, level=1)
            return taken or queued

    @property
    def max_entry_bytes(self) -> int | None:
        """Size of the largest entry that some tier has room for, if all others are evicted; ``None`` without a
        limit."""
        capacities = [tier.capacity for tier in self._stack.tiers]
        return None if None in capacities else max(capacity for capacity in capacities if capacity is not None)

    def wait_for_room(self) -> None:
        """Wait until more can be put without being dropped, as long as writing makes progress. For bulk fills of
        documents, not for an engine's steps."""
        self._stack.writer.wait_for_room()

    @contextmanager
    def pin(self, keys: Iterable[ChunkKey]) -> Iterator[None]:
        """Keep ``keys``, stored already or later, from being evicted inside the ``with`` block."""
        held = list(keys)
        with self._lock:
            self._known.pin(held)
        try:
            yield
        finally:
            with self._lock:
                self._known.unpin(held)

    def keep(self, keys: Iterable[ChunkKey]) -> None:
        """Keep ``keys`` from being evicted until :meth:`let_go`. Repeated calls change nothing."""
        with self._lock:
            new = set(keys) - self._kept
            self._known.pin(new)
            self._kept |= new

    def let_go(self, keys: Iterable[ChunkKey]) -> None:
        """Undo :meth:`keep`."""
        with self._lock:
            kept = set(keys) & self._kept
            self._known.unpin(kept)
            self._kept -= kept

    def let_go_of(self, matching: Callable[[ChunkKey], bool]) -> None:
        """Undo :meth:`keep` for all keys that are ``matching``."""
        with self._lock:
            self.let_go([key for key in self._kept if matching(key)])

    def take_changes(self) -> dict[ChunkKey, str | None]:
        """Keys that were added, moved or removed since the last call (at the first call: all keys), each with the
        fastest tier that now has it."""
        index = self._known.index
        with self._lock:
            changes: dict[ChunkKey, str | None] = dict.fromkeys(index.take_changes())
            for key in changes:
                record = index.lookup(key)
                if record is not None:
                    changes[key] = next(tier.name for tier in self._stack.tiers if tier.name in record.nbytes)
        return changes

    def scan(self) -> Iterator[EntryInfo]:
        """All entries this process knows of, each with the fastest tier that holds it."""
        index = self._known.index
        with self._lock:
            records = [
                (key, dict(record.nbytes), (key in index.pins, record.since, record.hits, record.kind))
                for key, record in index
            ]
        for key, nbytes, rest in records:
            tier = next(tier.name for tier in self._stack.tiers if tier.name in nbytes)
            yield EntryInfo(key, nbytes[tier], tier, *rest)

    def peek(self, key: ChunkKey) -> ChunkKV | None:
        """The entry of ``key``, if it is in memory. Not counted as a lookup."""
        return next(filter(None, (tier.get(key) for tier in self._stack.tiers if not tier.is_slow)), None)

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Remove entries from all tiers, including pinned ones. Undoes :meth:`keep` for them."""
        doomed = list(keys)
        self.let_go(doomed)
        self._stack.clearing.clear(OneOf(frozenset(doomed)))

    def clear(self, matching: Callable[[ChunkKey], bool] = lambda key: True) -> None:
        """Remove the entries whose key is ``matching``, by default all, from all tiers, including pinned ones, and
        undo :meth:`keep` for them. They are not found from now on. Slower tiers delete them later, see :meth:`flush`;
        a tier that is down does so when it is back. Files that were set aside stay."""
        self.let_go_of(matching)
        self._stack.clearing.clear(matching)

    def empty_memory(self, matching: Callable[[ChunkKey], bool] = lambda key: True) -> None:
        """Remove the entries whose key is ``matching``, by default all, from memory, including pinned ones. Slower
        tiers keep their copies, and entries that are queued for them are still written."""
        self._stack.empty_memory(matching)

    def flush(self) -> None:
        """Wait until all entries put so far are in the slower tiers or were refused there, and cleared ones are
        deleted, as long as there is progress."""
        self._stack.flush()

    def close(self) -> None:
        """Write queued entries, as long as there is progress, then close the tiers."""
        self._stack.close()

    def get_stats(self) -> dict[str, Any]:
        """Counters since the start, and the current contents. Sizes in MB of 2**20 bytes."""
        stack = self._stack
        with self._lock:
            hits, misses = self._hits.total(), self._misses.total()
            held_mb = {name: policy.nbytes / 2**20 for name, policy in stack.policies.items()}
            return {
                "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
                "total_chunks": len(self._known.index),
                "current_memory_mb": held_mb.get("host", 0.0),
                "device_mb": held_mb.get("device", 0.0),
                "disk_mb": held_mb.get("disk", 0.0),
                "cache_hits": hits,
                "cache_misses": misses,
                "hits_by_tier": {tier.name: self._hits[tier.name] for tier in stack.tiers},
                "misses_by_reason": {reason.value: self._misses[reason] for reason in MissReason},
                **{name: stack.counts[name] for name in EVENTS},
                "corrupt_set_aside": sum(tier.set_aside for tier in stack.tiers),
                "pinned": len(self._known.index.pins),
            }
