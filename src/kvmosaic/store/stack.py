"""Moves entries between tiers: into the budget of each, up when used, down when evicted."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError, EntryInfo, MissReason, Tier, TierDownError
from kvmosaic.store.eviction import S3Fifo
from kvmosaic.store.index import ChunkHashIndex
from kvmosaic.store.tiers.host import in_host_memory
from kvmosaic.store.writer import BackgroundWriter

logger = logging.getLogger(__name__)

ERROR_SECONDS = 30.0
"""A copy that could not be read for reasons that may pass is tried again after so long."""
STOCK_SECONDS = 10.0
"""So long after it was counted, a tier whose budget others use up as well is counted anew before it is written to."""
STOCK_SHARE = 0.02
"""Most of the time that such counting may take."""


class TierStack:
    """Tiers from fast to slow (a *level* is the place in that order), each kept within its budget.

    A tier that fails is counted and logged once, then again only after it worked in between; the others
    carry on, and no exception gets out.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = list(tiers)
        self.index = ChunkHashIndex()
        self.policies = {t.name: S3Fifo[ChunkKey](t.capacity) for t in tiers if t.capacity is not None}
        self.counts: Counter[str] = Counter()
        self.lock = threading.RLock()
        """Guards index, policies and counters. Not held while a slower tier reads or writes an entry.
        Order: this lock, then the writer's."""
        self.writer = BackgroundWriter(self._write_through)
        self._failing: set[tuple[str, str]] = set()
        self._unreadable: dict[tuple[int, ChunkKey], tuple[MissReason, float]] = {}
        """Copies whose last read failed, how, and until when: they count as absent until then, or until they are
        written anew."""
        self._stock_due = time.monotonic() + STOCK_SECONDS
        self.clears = 0
        """How often entries were cleared: what was read before must not come back."""
        for level, tier in enumerate(self.tiers):
            for info in self._scan(tier):
                # Opening a store evicts nothing, even if there is more than this process would keep.
                self._adopt(level, info.key, info.nbytes, make_room=False)

    def size(self, level: int, key: ChunkKey) -> int | None:
        """Bytes ``key`` takes at ``level`` now, or ``None``. A tier that fails counts as not having it."""
        if self._unreadable_reason(level, key) is not None:
            return None
        try:
            return self.tiers[level].size(key)
        except OSError as error:
            self._complain(self.tiers[level], "read", error)
            return None

    def contains(self, key: ChunkKey, far: bool = True) -> bool:
        """Whether ``key`` is in some tier, or on its way to one. Far tiers are asked only if ``far``."""
        # In the order entries move, so that one on the move is not missed.
        if self.size(0, key) is not None or self.writer.get(key) is not None:
            return True
        for level, tier in enumerate(self.tiers[1:], start=1):
            size = None if tier.is_far and not far else self.size(level, key)
            if size is not None:
                if not self.index.holds(key, self.tiers[level].name):  # another process wrote it
                    with self.lock:
                        self._adopt(level, key, size)
                return True
        return False

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
            except OSError as error:
                self._complain(tier, "read", error)
                continue
            for key in (key for key, found in zip(wanted, held, strict=True) if not found):
                absent.add((level, key))
                if self.index.holds(key, tier.name):  # the remote store dropped it, and told nobody
                    self._forget(level, key)
        return absent

    def lasting(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """Which of ``keys`` are in a tier whose entries outlive this process."""
        held: set[ChunkKey] = set()
        for tier in self.tiers:
            wanted = [key for key in keys if key not in held]
            if not wanted or not tier.lasts:
                continue
            try:
                held.update(key for key, found in zip(wanted, tier.holds(wanted), strict=True) if found)
            except OSError as error:
                self._complain(tier, "read", error)
        return held

    def read(self, level: int, key: ChunkKey) -> tuple[ChunkKV | None, MissReason | None]:
        """The entry of ``key`` at ``level``, or what went wrong if anything did."""
        reason = self._unreadable_reason(level, key)
        if reason is not None:
            return None, reason
        return self._taken(level, key, partial(self.tiers[level].get, key))

    def read_all(self, level: int, keys: Sequence[ChunkKey]) -> Iterator[tuple[ChunkKey, ChunkKV]]:
        """The entries of ``keys`` that are at ``level``, one after the other."""
        readable = [key for key in keys if self._unreadable_reason(level, key) is None]
        for key, get in self.tiers[level].get_all(readable):
            entry, _ = self._taken(level, key, get)
            if entry is not None:
                yield key, entry

    def _taken(
        self, level: int, key: ChunkKey, get: Callable[[], ChunkKV | None]
    ) -> tuple[ChunkKV | None, MissReason | None]:
        """What a tier's ``get`` returns, or what went wrong."""
        tier = self.tiers[level]
        try:
            entry = get()
        except CorruptEntryError:
            self._unreadable[level, key] = MissReason.CORRUPT, float("inf")
            self._forget(level, key)
            return None, MissReason.CORRUPT
        except TierDownError:  # which says nothing about this key
            return None, MissReason.ERROR
        except OSError as error:
            self._unreadable[level, key] = MissReason.ERROR, time.monotonic() + ERROR_SECONDS
            self._complain(tier, "read", error)
            return None, MissReason.ERROR
        self._failing.discard((tier.name, "read"))
        if entry is None and level == 0:
            entry = self.writer.get(key)
        if entry is None and self.index.holds(key, tier.name):
            self._forget(level, key)
        return entry, None

    def promote(self, level: int, entry: ChunkKV, clears: int) -> None:
        """Copy an entry found at ``level`` to the faster tiers. ``clears`` is from before it was read."""
        tier = self.tiers[level]
        with self.lock:
            size = tier.nbytes(entry) if tier.is_far else self.size(level, entry.key)
            if size is None or clears != self.clears:  # deleted since it was read; it must not come back
                return
            self._adopt(level, entry.key, size)  # maybe written by another process, so that it is news here
            if self.size(0, entry.key) is None and self.place(entry):
                self.counts["promotions"] += 1
        if level > 1:
            self.writer.add(entry, level=1)
        self.writer.wait_for_room()

    def place(self, entry: ChunkKV) -> bool:
        """Store an entry in the fastest tier, if it fits. The lock is held."""
        if not self._make_room(0, self.tiers[0].nbytes(entry)):
            return False
        size = self._put(0, entry)
        if size is None:
            return False
        self._adopt(0, entry.key, size)
        return True

    def clear(self, matching: Callable[[ChunkKey], bool]) -> None:
        """Delete the entries whose key is ``matching`` from every tier, known or not."""
        self.writer.flush()
        with self.lock:
            self.clears += 1
            for tier in self.tiers:
                known = [key for key, record in self.index if tier.name in record.nbytes]
                every = dict.fromkeys([*known, *(info.key for info in self._scan(tier))])
                cleared = list(filter(matching, every))
                self._delete(tier, cleared)
                for key in cleared:
                    self.index.remove(key, tier.name)
                    if tier.name in self.policies:
                        self.policies[tier.name].remove(key)
            self.index.forget_evictions(matching)

    def _write_through(self, entry: ChunkKV, first: int) -> None:
        """Store an entry in every tier from level ``first`` on that lacks it. Runs in the writer's thread."""
        for level, tier in list(enumerate(self.tiers))[first:]:
            size = self.size(level, entry.key)  # another process may have written it
            if size is None:
                if tier.shares_budget and time.monotonic() >= self._stock_due:
                    self._take_stock(level)
                with self.lock:
                    if not self._make_room(level, tier.nbytes(entry)):
                        continue
                size = self._put(level, entry)
                if size is None:
                    continue
            with self.lock:
                self._adopt(level, entry.key, size)

    def _put(self, level: int, entry: ChunkKV) -> int | None:
        """Store an entry at ``level``; the bytes it takes, or ``None`` when the tier failed."""
        tier = self.tiers[level]
        try:
            size = tier.put(entry)
        except OSError as error:
            with self.lock:
                self.counts["write_errors"] += 1
            self._complain(tier, "write", error)
            return None
        self._failing.discard((tier.name, "write"))
        self._unreadable.pop((level, entry.key), None)
        return size

    def _scan(self, tier: Tier) -> list[EntryInfo]:
        """What a tier holds; nothing when it fails."""
        try:
            return list(tier.scan())
        except OSError as error:
            self._complain(tier, "list its entries", error)
            return []

    def _take_stock(self, level: int) -> None:
        """Notice what other processes wrote to a tier, and what they deleted."""
        tier, start = self.tiers[level], time.monotonic()
        there = {info.key: info.nbytes for info in self._scan(tier)}
        with self.lock:
            gone = [key for key, record in self.index if tier.name in record.nbytes and key not in there]
            for key, nbytes in there.items():
                self._adopt(level, key, nbytes, make_room=False)  # whoever takes stock makes room next
        for key in gone:
            self._forget(level, key)
        now = time.monotonic()
        self._stock_due = now + max(STOCK_SECONDS, (now - start) / STOCK_SHARE)

    def _adopt(self, level: int, key: ChunkKey, nbytes: int, make_room: bool = True) -> None:
        """Take an entry that is in a tier into account."""
        tier = self.tiers[level]
        if self.index.holds(key, tier.name):
            return
        self.index.insert(key, tier.name, nbytes)
        policy = self.policies.get(tier.name)
        if policy is not None:
            policy.add(key, nbytes)
            if make_room:
                self._make_room(level, 0)  # what another process wrote may be more than fits

    def _forget(self, level: int, key: ChunkKey) -> None:
        """Stop counting an entry that vanished, unless it is back by now."""
        name = self.tiers[level].name
        with self.lock:
            if self.tiers[level].is_far or self.size(level, key) is None:
                self.index.remove(key, name)
                if name in self.policies:
                    self.policies[name].remove(key)

    def _make_room(self, level: int, nbytes: int) -> bool:
        policy = self.policies.get(self.tiers[level].name)
        victims = policy.make_room(nbytes, self.index.pins) if policy is not None else []
        for key in victims or ():
            self._evict(level, key)
        return victims is not None

    def _evict(self, level: int, key: ChunkKey) -> None:
        tier = self.tiers[level]
        below = level + 1
        if below < len(self.tiers) and self.writer.get(key) is None and not self._has(below, key):
            entry, _ = self.read(level, key)
            if entry is not None:
                self.counts["demotions"] += 1
                # A copy: what a tier handed out may be a view of memory that is about to be used again.
                self.writer.add(in_host_memory(entry), below)
        self._delete(tier, [key])
        self.index.remove(key, tier.name, evicted=True)
        self.counts["evictions"] += 1

    def _has(self, level: int, key: ChunkKey) -> bool:
        """Whether a tier has ``key``; of a far one, whether it had when last heard of. The lock is held."""
        tier = self.tiers[level]
        return self.index.holds(key, tier.name) if tier.is_far else self.size(level, key) is not None

    def _delete(self, tier: Tier, keys: Sequence[ChunkKey]) -> None:
        try:
            tier.delete_all(keys)
        except OSError as error:
            self._complain(tier, "delete", error)

    def _unreadable_reason(self, level: int, key: ChunkKey) -> MissReason | None:
        reason, until = self._unreadable.get((level, key), (None, 0.0))
        if reason is not None and time.monotonic() > until:
            self._unreadable.pop((level, key), None)
            return None
        return reason

    def _complain(self, tier: Tier, action: str, error: OSError) -> None:
        if (tier.name, action) not in self._failing and not isinstance(error, TierDownError):
            self._failing.add((tier.name, action))
            logger.warning(
                "the %s tier failed to %s (%s); going on without it for now, check its space and permissions",
                tier.name,
                action,
                error,
            )
