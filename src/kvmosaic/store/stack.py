"""Moves entries between tiers: up when used, down when evicted, within the budget of each tier."""

import logging
import time
from collections.abc import Sequence
from functools import partial

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import TIER_ERRORS, Tier
from kvmosaic.store.clearing import Clearing
from kvmosaic.store.due_clears import Matching
from kvmosaic.store.known_tiers import KnownTiers
from kvmosaic.store.tiers.host import HostTier, in_host_memory
from kvmosaic.store.writer import BackgroundWriter

logger = logging.getLogger(__name__)

STOCK_SECONDS = 10.0
"""Minimum seconds between two listings of a tier whose budget other processes share. It is listed before writes."""
STOCK_SHARE = 0.02
"""Maximum share of the time that such listings may take."""


class TierStack:
    """Tiers, each kept within its budget. Only the writer's thread changes slow ones."""

    def __init__(self, tiers: Sequence[Tier], kv_format: KVFormat | None = None) -> None:
        self.writer = BackgroundWriter(self._write_through, self._tidy, lambda: sum(tier.progress for tier in tiers))
        self.known = known = KnownTiers(tiers, kv_format, self.writer.get, self._make_room)
        self.tiers, self.index, self.policies = known.tiers, known.index, known.policies
        self.counts, self.lock = known.counts, known.lock
        self.clearing = Clearing(known, self.writer)
        self._stock_due = time.monotonic() + STOCK_SECONDS
        self._unlisted = [level for level in range(len(self.tiers)) if not self._list(level)]
        """Levels of tiers that could not be listed since the start."""
        for tier in self.tiers:
            tier.call_when_up(self.writer.request_tidying)
        if self._unlisted:  # one may have come back before the calls were registered
            self.writer.request_tidying()

    def contains(self, key: ChunkKey, far: bool = True) -> bool:
        """Whether ``key`` is in some tier, or on its way to one. Unless ``far``, slow tiers are not asked: near ones
        count if they are believed to have it, far ones do not count."""
        # In the order in which entries move, so that a moving one is not missed.
        if self.known.size(0, key) is not None or self.writer.get(key) is not None:
            return True
        for level, tier in enumerate(self.tiers[1:], start=1):
            if not far and tier.is_slow:
                if not tier.is_far and self.known.is_believed(level, key):
                    return True
            elif self.known.settle(level, key) is not None:
                return True
        return False

    def promote(self, level: int, entry: ChunkKV, clears: int) -> None:
        """Copy an entry found at ``level`` to the faster tiers. ``clears``: number of clears before it was read."""
        tier, key = self.tiers[level], entry.key
        if not tier.is_far and self.known.settle(level, key) is None:  # deleted since it was read
            return
        with self.lock:
            if clears != self.known.due.count:  # cleared since it was read: it must not come back
                return
            if tier.is_far:
                self._adopt(level, key, tier.nbytes(entry))
            is_new = self.known.size(0, key) is None
            if is_new and self.place(entry):
                self.counts["promotions"] += 1
            if level > 1:
                self.enqueue(entry, level=1)

    def place(self, entry: ChunkKV) -> bool:
        """Store an entry in the fastest tier, if it fits. The lock is held."""
        if not self._make_room(0, self.tiers[0].nbytes(entry)):
            return False
        size = self._put(0, entry)
        if size is None:
            return False
        self._adopt(0, entry.key, size)
        return True

    def enqueue(self, entry: ChunkKV, level: int) -> bool:
        """Queue an entry for all tiers from ``level`` on. Returns whether there was room; if not, the entry is
        dropped and counted."""
        same = self.tiers[0].get(entry.key) if isinstance(self.tiers[0], HostTier) else None
        added = self.writer.add(same or entry, level, is_extra=same is None)
        if not added:
            self._note_drop(1)
        return added

    def can_hold(self, entry: ChunkKV) -> bool:
        """Whether some tier below the fastest would take an entry."""
        for tier in self.tiers[1:]:
            policy = self.policies.get(tier.name)
            if tier.is_up and (policy is None or policy.can_hold(tier.nbytes(entry))):
                return True
        return False

    def empty_memory(self, matching: Matching) -> None:
        """Remove the entries whose key is ``matching`` from memory only. Those that are queued for slower tiers are
        still written there, as far as the queue has room."""
        with self.lock:
            self.known.changes += 1
            for tier in self.tiers:
                if tier.is_slow:
                    continue
                held = [key for key, record in self.index if tier.name in record.nbytes and matching(key)]
                for key in held:
                    self.known.drop(tier, key)
                    if not self.writer.outlives(key):
                        self._note_drop(1)
                self.known.delete(tier, held)

    def flush(self) -> None:
        """Wait until all queued entries are in the slower tiers or were refused, as long as there is progress."""
        left = self.writer.flush()
        if left:
            logger.warning("%d entries are still not written to the slower tiers; continuing without waiting", left)

    def close(self) -> None:
        """Write queued entries, then close the tiers. Entries that cannot be written are dropped and counted."""
        left = self.writer.flush()
        if left:
            self._note_drop(self.writer.discard(lambda key: True))
            logger.warning("%d entries could not be written to the slower tiers before the end; they are lost", left)
        self.clearing.give_up()
        for tier in self.tiers:
            tier.close()

    def _tidy(self) -> None:
        """Do all pending work in slow tiers that can be done now. Runs in the writer's thread."""
        self.clearing.carry_out()
        self._unlisted = [level for level in self._unlisted if not self.tiers[level].is_up or not self._list(level)]
        self._remove_doomed()

    def _write_through(self, entry: ChunkKV, first: int, is_believed: bool) -> None:
        """Store an entry in every tier from level ``first`` on that lacks it. Runs in the writer's thread."""
        key = entry.key
        for level, tier in list(enumerate(self.tiers))[first:]:
            if self.known.due.covers(level, key):  # cleared, and not deleted there yet
                with self.lock:
                    self.counts["write_errors"] += self.writer.get(key) is not None
                continue
            self._remove_doomed()
            size = self.known.size(level, key)
            is_found = size is not None
            if size is None:
                if tier.shares_budget and time.monotonic() >= self._stock_due:
                    self._take_stock(level)
                with self.lock:
                    if not self._make_room(level, tier.nbytes(entry)):
                        continue
                    self.counts["demotions"] += is_believed and level == first
                self._remove_doomed()  # before their room is used
                size = self._put(level, entry)
                if size is None:
                    continue
            with self.lock:
                self.known.changes += 1
                if self.known.due.covers(level, key):  # the new copy is deleted next
                    continue
                if is_found:
                    self.known.adopt_found(level, key, size)
                self._adopt(level, key, size)

    def _put(self, level: int, entry: ChunkKV) -> int | None:
        """Store an entry at ``level``. Returns the bytes it takes, or ``None`` when the tier failed."""
        tier = self.tiers[level]
        try:
            size = tier.put(entry)
        except TIER_ERRORS as error:
            with self.lock:
                self.counts["write_errors"] += 1
            self.known.complain(tier, "write", error)
            return None
        self.known.worked(tier, "write")
        self.known.unreadable.written(level, entry.key)
        return size

    def _list(self, level: int) -> bool:
        """Update the account from a listing of a tier. Returns whether it could be listed. Evicts nothing, even if
        the tier holds more than its budget."""
        there = self.known.scan(self.tiers[level])
        if there is None:
            return False
        with self.lock:
            for info in there.entries:
                if not self.known.is_leaving(level, info.key):  # evicted or cleared since it was listed
                    self.known.adopt(level, info.key, info.nbytes)
                    self.index.describe(info.key, info.kind, since=info.since)
            if not there.is_whole:
                return True
            known = [key for key, record in self.index if self.tiers[level].name in record.nbytes]
        listed = {info.key for info in there.entries}
        for key in known:
            if key not in listed:
                self.known.forget(level, key)
        return True

    def _take_stock(self, level: int) -> None:
        """List a tier again, to notice entries that other processes wrote or deleted."""
        start = time.monotonic()
        self._list(level)
        now = time.monotonic()
        self._stock_due = now + max(STOCK_SECONDS, (now - start) / STOCK_SHARE)

    def _adopt(self, level: int, key: ChunkKey, nbytes: int) -> None:
        self.known.adopt(level, key, nbytes)
        self._make_room(level, 0)  # entries of other processes may exceed the budget

    def _make_room(self, level: int, nbytes: int) -> bool:
        """Evict from a tier until ``nbytes`` more fit. Returns whether they do. The lock is held, so evictions from a
        slow tier are left to the writer."""
        policy = self.policies.get(self.tiers[level].name)
        victims = policy.make_room(nbytes) if policy is not None else []
        for key in victims or ():
            self._evict(level, key)
        return victims is not None

    def _evict(self, level: int, key: ChunkKey) -> None:
        tier = self.tiers[level]
        if tier.is_slow:
            self.known.doomed[level, key] = None
            self.known.changes += 1
            self.writer.request_tidying()
        else:
            if level + 1 < len(self.tiers):
                self._demote(level, key)
            self.known.delete(tier, [key])
        self.index.remove(key, tier.name, evicted=True)
        self.counts["evictions"] += 1

    def _demote(self, level: int, key: ChunkKey) -> None:
        """Pass an entry that is about to be evicted to the next tier. The lock is held."""
        below = level + 1
        if self.writer.get(key) is not None:
            if not self.writer.outlives(key):
                self._note_drop(1)
            return
        is_believed = self.known.is_believed(below, key)
        tier = self.tiers[below]
        # Another process may have deleted it, which only the tier knows. Asking a far tier would take too long.
        if is_believed and (tier.is_far or not tier.is_slow):
            return
        entry, _ = self.known.read(level, key)
        if entry is None:
            return
        try:
            # A copy: the entry may be a view of memory that is about to be reused.
            added = self.writer.add(in_host_memory(entry), below, is_believed=is_believed)
        except TIER_ERRORS as error:
            self.known.complain(tier, "get memory for an evicted entry", error)
            added = False
        if is_believed:
            return
        self.counts["demotions"] += added
        if not added:
            self._note_drop(1)

    def _remove_doomed(self) -> None:
        """Delete entries evicted from slow tiers, after queueing them for the next tier if it lacks them. Runs in the
        writer's thread."""
        while True:
            with self.lock:
                if not self.known.doomed:
                    return
                level, key = next(iter(self.known.doomed))
            below = level + 1
            if below < len(self.tiers) and not self.known.is_believed(below, key) and self.writer.get(key) is None:
                entry, _ = self.known.taken(level, key, partial(self.tiers[level].get, key))
                with self.lock:
                    was_cleared = (level, key) not in self.known.doomed
                    if entry is not None and not was_cleared and self.enqueue(entry, below):
                        self.counts["demotions"] += 1
            self.known.delete(self.tiers[level], [key])
            with self.lock:
                self.known.doomed.pop((level, key), None)
                self.known.changes += 1

    def _note_drop(self, count: int) -> None:
        with self.lock:
            if not self.counts["dropped_writes"]:
                logger.warning("entries arrive faster than the slower tiers take them; some are not written there")
            self.counts["dropped_writes"] += count
