"""What is known of tiers, and how they are asked: whatever fails is counted, and stops nobody."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import TIER_ERRORS, CorruptEntryError, EntryInfo, MissReason, Tier, TierDownError
from kvmosaic.store.due_clears import DueClears, Matching
from kvmosaic.store.eviction import S3Fifo
from kvmosaic.store.index import ChunkHashIndex
from kvmosaic.store.unreadable import Unreadable

logger = logging.getLogger(__name__)

SETTLE_TRIES = 10


class KnownTiers:
    """Tiers from fast to slow (a *level* is the place in that order), and an account of what is in them.

    A tier that fails is counted and logged once, then again only after it worked in between; the others
    carry on, and no exception gets out.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        kv_format: KVFormat | None,
        queued: Callable[[ChunkKey], ChunkKV | None],
        make_room: Callable[[int, int], bool],
    ) -> None:
        """``queued`` are entries on their way to slower tiers; ``make_room`` evicts from a level until it has room
        for so many bytes more."""
        self._queued = queued
        self._make_room = make_room
        self.format = kv_format
        """Of all entries here, if that is known."""
        self.tiers = list(tiers)
        self.index = ChunkHashIndex()
        self.policies = {t.name: S3Fifo[ChunkKey](t.capacity) for t in tiers if t.capacity is not None}
        self.counts: Counter[str] = Counter()
        self.lock = threading.RLock()
        """Guards index, policies and counters. Never held while a slow tier is asked for anything.
        Order: this lock, then the writer's."""
        self._failing: set[tuple[str, str]] = set()
        self.unreadable = Unreadable()
        self.due = DueClears()
        self.doomed: dict[tuple[int, ChunkKey], None] = {}
        """Evicted from a slow tier, and still there: they count as absent until the writer has deleted them."""
        self.changes = 0
        """How often the writer's doings changed what is in slow tiers: answers from before are void."""

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
        """Whether a copy was evicted or cleared, and is still there only because nobody could delete it yet."""
        return (level, key) in self.doomed or self.due.covers(level, key)

    def absent(self, keys: Collection[ChunkKey]) -> set[tuple[int, ChunkKey]]:
        """Which of ``keys`` are not at which far level, each asked once about all that no near tier has."""
        absent: set[tuple[int, ChunkKey]] = set()
        for level, tier in enumerate(self.tiers):
            if not tier.is_far:
                continue
            wanted = list(keys)
            for above in range(level):
                if not self.tiers[above].is_far:
                    wanted = [key for key in wanted if self.size(above, key) is None]
            if len(wanted) < 2:
                continue
            try:
                held = tier.holds(wanted)
            except TIER_ERRORS as error:
                self.complain(tier, "read", error)
                continue
            for key in (key for key, found in zip(wanted, held, strict=True) if not found):
                absent.add((level, key))
                if self.index.holds(key, tier.name):  # the remote store dropped it, and told nobody
                    self.forget(level, key)
        return absent

    def lasting(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Which of ``keys`` are in a tier whose entries outlive this process: a slow one."""
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
        """The entry of ``key`` at ``level``, or what went wrong if anything did."""
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
        """What a tier's ``get`` returns, or what went wrong."""
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
        if entry is not None and not self.takes(entry):  # tiers check what others can write; this is for all of them
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
        """Whether an entry is of the format of this store."""
        return self.format is None or entry.format == self.format

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Keep keys from being evicted, once more. The lock is held."""
        for key in keys:
            if self.index.pin(key):
                for policy in self.policies.values():
                    policy.pin(key)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Undo one :meth:`pin` of each. The lock is held."""
        for key in keys:
            if self.index.unpin(key):
                for policy in self.policies.values():
                    policy.unpin(key)

    def settle(self, level: int, key: ChunkKey) -> int | None:
        """Bring what is known of a key into line with what a tier says, unless that fails; its size there."""
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
                    continue  # the writer was at it meanwhile: ask again
                if size is None:
                    self.drop(self.tiers[level], key)
                else:
                    self.adopt(level, key, size)  # maybe written by another process
                    self._make_room(level, 0)
                return size
        return size

    def adopt(self, level: int, key: ChunkKey, nbytes: int) -> None:
        """Take an entry that is in a tier into account. The lock is held."""
        tier = self.tiers[level]
        if not self.index.holds(key, tier.name):
            self.index.insert(key, tier.name, nbytes)
            if tier.name in self.policies:
                self.policies[tier.name].add(key, nbytes)

    def forget(self, level: int, key: ChunkKey) -> None:
        """Stop counting an entry that vanished, unless it is back by now."""
        tier = self.tiers[level]
        if tier.is_far:
            with self.lock:
                self.drop(tier, key)
        else:
            self.settle(level, key)

    def drop(self, tier: Tier, key: ChunkKey) -> None:
        """Stop counting an entry. The lock is held."""
        self.index.remove(key, tier.name)
        if tier.name in self.policies:
            self.policies[tier.name].remove(key)

    def is_believed(self, level: int, key: ChunkKey) -> bool:
        """Whether a tier has ``key``; of a slow one, whether it had when last heard of, and can be asked for it."""
        tier = self.tiers[level]
        if not tier.is_slow:
            return self.size(level, key) is not None
        return tier.is_up and self._is_readable(level, key) and self.index.holds(key, tier.name)

    def scan(self, tier: Tier) -> list[EntryInfo] | None:
        """What a tier holds; ``None`` when it fails."""
        try:
            return list(tier.scan())
        except TIER_ERRORS as error:
            self.complain(tier, "list its entries", error)
            return None

    def delete(self, tier: Tier, keys: Sequence[ChunkKey]) -> None:
        """Drop entries from a tier, as far as it does not fail."""
        try:
            tier.delete_all(keys)
        except TIER_ERRORS as error:
            self.complain(tier, "delete", error)

    def forget_troubles(self, matching: Matching) -> None:
        """Entries are cleared: whether they were evicted or could be read is of no interest now. The lock is held."""
        self.doomed = {place: None for place in self.doomed if not matching(place[1])}
        self.index.forget_evictions(matching)
        self.unreadable.forget(matching)

    def worked(self, tier: Tier, action: str) -> None:
        """The next failure is worth a line again."""
        self._failing.discard((tier.name, action))

    def complain(self, tier: Tier, action: str, error: Exception) -> None:
        """Say that a tier failed, unless that is known."""
        if (tier.name, action) not in self._failing and not isinstance(error, TierDownError):
            self._failing.add((tier.name, action))
            logger.warning(
                "the %s tier failed to %s (%s); going on without it for now, check its space and permissions",
                tier.name,
                action,
                error,
            )
