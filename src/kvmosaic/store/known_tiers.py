"""Calls to tiers, and an account of their contents. A tier that fails stops no caller."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import TIER_ERRORS, CorruptEntryError, EntryInfo, MissReason, Tier, TierDownError
from kvmosaic.store.due_clears import DueClears, Matching
from kvmosaic.store.eviction import S3Fifo
from kvmosaic.store.index import ChunkHashIndex
from kvmosaic.store.unreadable import Unreadable

logger = logging.getLogger(__name__)

SETTLE_TRIES = 10
MAX_LISTED = 2**19
"""Maximum number of entries of a tier that are learnt from a listing. Somebody who can write to the tier may plant
any number of well-formed names, each of which costs this process about a kilobyte."""


class Listing(NamedTuple):
    """The entries of a tier."""

    entries: list[EntryInfo]
    is_whole: bool
    """Whether these are all."""


class KnownTiers:
    """Tiers from fast to slow (a *level* is the index in that order), and an account of their contents.

    A failure of a tier is logged once, and again only after the tier worked in between. The other tiers continue, and
    no exception gets out.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        kv_format: KVFormat | None,
        queued: Callable[[ChunkKey], ChunkKV | None],
        make_room: Callable[[int, int], bool],
    ) -> None:
        """``queued`` returns an entry that is on its way to slower tiers. ``make_room`` evicts from a level until a
        number of bytes more fit."""
        self._queued = queued
        self._make_room = make_room
        self.format = kv_format
        """Format of all entries of this store, if it is known."""
        self.tiers = list(tiers)
        self.index = ChunkHashIndex()
        self.policies = {t.name: S3Fifo[ChunkKey](t.capacity) for t in tiers if t.capacity is not None}
        self.counts: Counter[str] = Counter()
        self.lock = threading.RLock()
        """Guards index, policies and counters. Never held during a call to a slow tier.
        Order: this lock, then the writer's."""
        self._failing: set[tuple[str, str]] = set()
        self._overfull: set[str] = set()
        """Tiers that had too many entries to list."""
        self.unreadable = Unreadable()
        self.due = DueClears()
        self.doomed: dict[tuple[int, ChunkKey], None] = {}
        """Entries that were evicted from a slow tier. They count as absent until the writer has deleted them."""
        self.has_company = False
        """Whether another process was seen to write to the disk that this one writes to."""
        self.changes = 0
        """Number of changes to slow tiers so far. An answer that a tier gave before a change is invalid."""

    def size(self, level: int, key: ChunkKey) -> int | None:
        """Bytes ``key`` takes at ``level`` now, or ``None``. A tier that fails counts as not having it."""
        try:
            return self._ask(level, key)
        except TIER_ERRORS as error:
            self.complain(self.tiers[level], "read", error)
            return None

    def _ask(self, level: int, key: ChunkKey) -> int | None:
        return self.tiers[level].size(key) if self._is_readable(level, key) else None

    def _is_readable(self, level: int, key: ChunkKey) -> bool:
        return self.unreadable.reason(level, key) is None and not self.is_leaving(level, key)

    def is_leaving(self, level: int, key: ChunkKey) -> bool:
        """Whether a copy was evicted or cleared and is not deleted yet."""
        return (level, key) in self.doomed or self.due.covers(level, key)

    def absent(self, keys: Collection[ChunkKey]) -> set[tuple[int, ChunkKey]]:
        """Pairs of a slow level and a key that is absent there. Each slow tier is asked once, about all keys that no
        tier above it has, if these are at least two."""
        absent: set[tuple[int, ChunkKey]] = set()
        wanted = list(keys)
        for level, tier in enumerate(self.tiers):
            if not tier.is_slow:
                wanted = [key for key in wanted if self.size(level, key) is None]
                continue
            # Only after memory was asked: an entry on its way to a tier may arrive there at any moment.
            wanted = [key for key in wanted if self._queued(key) is None]
            if len(wanted) < 2:
                continue
            try:
                held = tier.holds(wanted)
            except TIER_ERRORS as error:
                self.complain(tier, "read", error)
                continue
            wanted = [key for key, found in zip(wanted, held, strict=True) if not found]
            absent.update((level, key) for key in wanted)
            for key in wanted:
                if self.index.holds(key, tier.name):  # another process or the remote store dropped it
                    self.forget(level, key)
        return absent

    def lasting(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Those of ``keys`` that are in a slow tier, whose entries outlive this process."""
        held: set[ChunkKey] = set()
        for level, tier in enumerate(self.tiers):
            wanted = [key for key in keys if key not in held and not self.is_leaving(level, key)]
            if not wanted or not tier.is_slow:
                continue
            try:
                held.update(key for key, found in zip(wanted, tier.holds(wanted), strict=True) if found)
            except TIER_ERRORS as error:
                self.complain(tier, "read", error)
        return held

    def read(self, level: int, key: ChunkKey) -> tuple[ChunkKV | None, MissReason | None]:
        """The entry of ``key`` at ``level``, or ``None`` and the reason for a failure, if there was one."""
        reason = self.unreadable.reason(level, key)
        if reason is not None or self.is_leaving(level, key):
            return None, reason
        return self.taken(level, key, partial(self.tiers[level].get, key))

    def read_all(self, level: int, keys: Sequence[ChunkKey]) -> Iterator[tuple[ChunkKey, ChunkKV]]:
        """The entries of ``keys`` that are at ``level``, one after the other."""
        readable = [key for key in keys if self._is_readable(level, key)]
        for key, get in self.tiers[level].get_all(readable):
            entry, _ = self.taken(level, key, get)
            if entry is not None:
                yield key, entry

    def taken(
        self, level: int, key: ChunkKey, get: Callable[[], ChunkKV | None]
    ) -> tuple[ChunkKV | None, MissReason | None]:
        """The entry that a tier's ``get`` returns, or ``None`` and the reason for a failure."""
        tier = self.tiers[level]
        try:
            entry = get()
        except CorruptEntryError:
            self.unreadable.note(level, key, MissReason.CORRUPT)
            self.forget(level, key)
            return None, MissReason.CORRUPT
        except TierDownError:  # which says nothing about this key
            return None, MissReason.ERROR
        except TIER_ERRORS as error:
            self.unreadable.note(level, key, MissReason.ERROR)
            self.complain(tier, "read", error)
            return None, MissReason.ERROR
        self.worked(tier, "read")
        if entry is not None and not self.takes(entry):  # tiers check what others can write; this is for all
            self.unreadable.note(level, key, MissReason.CORRUPT)
            self.delete(tier, [key])
            self.forget(level, key)
            return None, MissReason.CORRUPT
        if entry is None and level == 0:
            entry = self._queued(key)
        if entry is None and self.index.holds(key, tier.name):
            self.forget(level, key)
        return entry, None

    def takes(self, entry: ChunkKV) -> bool:
        """Whether an entry has the format of this store, in the numbers that its key says."""
        return self.format is None or entry.format == self.format.of(entry.key)

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Pin keys once more, so that they are not evicted. The lock is held."""
        for key in keys:
            if self.index.pin(key):
                for policy in self.policies.values():
                    policy.pin(key)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Undo one :meth:`pin` of each key. The lock is held."""
        for key in keys:
            if self.index.unpin(key):
                for policy in self.policies.values():
                    policy.unpin(key)

    def settle(self, level: int, key: ChunkKey) -> int | None:
        """Ask a tier for a key and update the account, unless that fails. Returns the key's size there."""
        size = None
        for _ in range(SETTLE_TRIES):
            changes = self.changes
            try:
                size = self._ask(level, key)
            except TIER_ERRORS as error:
                self.complain(self.tiers[level], "read", error)
                return None
            with self.lock:
                if changes != self.changes:
                    continue  # slow tiers changed meanwhile: ask again
                if size is None:
                    self.drop(self.tiers[level], key)
                else:
                    self.adopt_found(level, key, size)
                    self._make_room(level, 0)
                return size
        return size

    def adopt(self, level: int, key: ChunkKey, nbytes: int) -> None:
        """Add an entry that is in a tier to the account. The lock is held."""
        tier = self.tiers[level]
        if not self.index.holds(key, tier.name):
            self.index.insert(key, tier.name, nbytes)
            if tier.name in self.policies:
                self.policies[tier.name].add(key, nbytes)

    def adopt_found(self, level: int, key: ChunkKey, nbytes: int) -> None:
        """Add an entry that was found in a tier. If it is new to this process, another one has written it. The lock
        is held."""
        tier = self.tiers[level]
        self.has_company |= tier.is_slow and not tier.is_far and not self.index.holds(key, tier.name)
        self.adopt(level, key, nbytes)

    def forget(self, level: int, key: ChunkKey) -> None:
        """Remove a vanished entry from the account, unless it is back by now."""
        tier = self.tiers[level]
        if tier.is_far:
            with self.lock:
                self.drop(tier, key)
        else:
            self.settle(level, key)

    def drop(self, tier: Tier, key: ChunkKey) -> None:
        """Remove an entry from the account. The lock is held."""
        self.index.remove(key, tier.name)
        if tier.name in self.policies:
            self.policies[tier.name].remove(key)

    def is_believed(self, level: int, key: ChunkKey) -> bool:
        """Whether a tier has ``key``. For a slow tier: whether it had it when last asked, and it can be read now."""
        tier = self.tiers[level]
        if not tier.is_slow:
            return self.size(level, key) is not None
        return tier.is_up and self._is_readable(level, key) and self.index.holds(key, tier.name)

    def scan(self, tier: Tier) -> Listing | None:
        """The entries of a tier, at most :data:`MAX_LISTED`; ``None`` when it fails."""
        try:
            entries = list(islice(tier.scan(), MAX_LISTED + 1))
        except TIER_ERRORS as error:
            self.complain(tier, "list its entries", error)
            return None
        if len(entries) <= MAX_LISTED:
            return Listing(entries, is_whole=True)
        if tier.name not in self._overfull:
            self._overfull.add(tier.name)
            logger.warning(
                "the %s tier has more than %d entries; the others are found only when they are asked for or written "
                "again, and do not count in its budget",
                tier.name,
                MAX_LISTED,
            )
        return Listing(entries[:MAX_LISTED], is_whole=False)

    def delete(self, tier: Tier, keys: Sequence[ChunkKey]) -> None:
        """Delete entries from a tier. A failure is logged."""
        try:
            tier.delete_all(keys)
        except TIER_ERRORS as error:
            self.complain(tier, "delete", error)

    def forget_troubles(self, matching: Matching) -> None:
        """Forget evictions and failed reads of entries that are cleared. The lock is held."""
        self.doomed = {place: None for place in self.doomed if not matching(place[1])}
        self.index.forget_evictions(matching)
        self.unreadable.forget(matching)

    def worked(self, tier: Tier, action: str) -> None:
        """Note a success, so that the next failure is logged again."""
        self._failing.discard((tier.name, action))

    def complain(self, tier: Tier, action: str, error: Exception) -> None:
        """Log that a tier failed, unless that was logged already."""
        if (tier.name, action) not in self._failing and not isinstance(error, TierDownError):
            self._failing.add((tier.name, action))
            logger.warning(
                "the %s tier failed to %s (%s); continuing without it for now, check its space and permissions",
                tier.name,
                action,
                error,
            )
