"""What is known of tiers, and how they are asked: whatever fails is counted, and stops nobody."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import TIER_ERRORS, CorruptEntryError, EntryInfo, MissReason, Tier, TierDownError
from kvmosaic.store.eviction import S3Fifo
from kvmosaic.store.index import ChunkHashIndex
from kvmosaic.store.writer import BackgroundWriter

logger = logging.getLogger(__name__)

ERROR_SECONDS = 30.0
"""A copy that could not be read for reasons that may pass is tried again after so long."""
SETTLE_TRIES = 10


class KnownTiers:
    """Tiers from fast to slow (a *level* is the place in that order), and an account of what is in them.

    A tier that fails is counted and logged once, then again only after it worked in between; the others
    carry on, and no exception gets out.
    """

    writer: BackgroundWriter

    def __init__(self, tiers: Sequence[Tier], kv_format: KVFormat | None) -> None:
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
        self._unreadable: dict[tuple[int, ChunkKey], tuple[MissReason, float]] = {}
        """Copies whose last read failed, how, and until when: they count as absent until then, or until they are
        written anew."""
        self._doomed: dict[tuple[int, ChunkKey], None] = {}
        """Evicted from a slow tier, and still there: they count as absent until the writer has deleted them."""
        self._changes = 0
        """How often the writer's doings changed what is in slow tiers: answers from before are void."""

    def size(self, level: int, key: ChunkKey) -> int | None:
        """Bytes ``key`` takes at ``level`` now, or ``None``. A tier that fails counts as not having it."""
        try:
            return self._ask(level, key)
        except TIER_ERRORS as error:
            self._complain(self.tiers[level], "read", error)
            return None

    def _ask(self, level: int, key: ChunkKey) -> int | None:
        if self._unreadable_reason(level, key) is not None or (level, key) in self._doomed:
            return None
        return self.tiers[level].size(key)

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
        for level, tier in enumerate(self.tiers):
            wanted = [key for key in keys if key not in held and (level, key) not in self._doomed]
            if not wanted or not tier.lasts:
                continue
            try:
                held.update(key for key, found in zip(wanted, tier.holds(wanted), strict=True) if found)
            except TIER_ERRORS as error:
                self._complain(tier, "read", error)
        return held

    def read(self, level: int, key: ChunkKey) -> tuple[ChunkKV | None, MissReason | None]:
        """The entry of ``key`` at ``level``, or what went wrong if anything did."""
        reason = self._unreadable_reason(level, key)
        if reason is not None or (level, key) in self._doomed:
            return None, reason
        return self._taken(level, key, partial(self.tiers[level].get, key))

    def read_all(self, level: int, keys: Sequence[ChunkKey]) -> Iterator[tuple[ChunkKey, ChunkKV]]:
        """The entries of ``keys`` that are at ``level``, one after the other."""
        readable = [
            key for key in keys if self._unreadable_reason(level, key) is None and (level, key) not in self._doomed
        ]
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
        except TIER_ERRORS as error:
            self._unreadable[level, key] = MissReason.ERROR, time.monotonic() + ERROR_SECONDS
            self._complain(tier, "read", error)
            return None, MissReason.ERROR
        self._failing.discard((tier.name, "read"))
        if entry is not None and not self.takes(entry):  # tiers check what others can write; this is for all of them
            self._unreadable[level, key] = MissReason.CORRUPT, float("inf")
            self._delete(tier, [key])
            self._forget(level, key)
            return None, MissReason.CORRUPT
        if entry is None and level == 0:
            entry = self.writer.get(key)
        if entry is None and self.index.holds(key, tier.name):
            self._forget(level, key)
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

    def _settle(self, level: int, key: ChunkKey) -> int | None:
        """Bring what is known of a key into line with what a tier says, unless that fails; its size there."""
        size = None
        for _ in range(SETTLE_TRIES):
            changes = self._changes
            try:
                size = self._ask(level, key)
            except TIER_ERRORS as error:
                self._complain(self.tiers[level], "read", error)
                return None
            with self.lock:
                if changes != self._changes:
                    continue  # the writer was at it meanwhile: ask again
                if size is None:
                    self._drop(self.tiers[level], key)
                else:
                    self._adopt(level, key, size)  # maybe written by another process
                return size
        return size

    def _adopt(self, level: int, key: ChunkKey, nbytes: int) -> None:
        """Take an entry that is in a tier into account. The lock is held."""
        tier = self.tiers[level]
        if not self.index.holds(key, tier.name):
            self.index.insert(key, tier.name, nbytes)
            if tier.name in self.policies:
                self.policies[tier.name].add(key, nbytes)

    def _forget(self, level: int, key: ChunkKey) -> None:
        """Stop counting an entry that vanished, unless it is back by now."""
        tier = self.tiers[level]
        if tier.is_far:
            with self.lock:
                self._drop(tier, key)
        else:
            self._settle(level, key)

    def _drop(self, tier: Tier, key: ChunkKey) -> None:
        self.index.remove(key, tier.name)
        if tier.name in self.policies:
            self.policies[tier.name].remove(key)

    def _is_believed(self, level: int, key: ChunkKey) -> bool:
        """Whether a tier has ``key``; of a slow one, whether it had when last heard of, and can be asked for it."""
        tier = self.tiers[level]
        if not tier.is_slow:
            return self.size(level, key) is not None
        is_readable = self._unreadable_reason(level, key) is None and (level, key) not in self._doomed
        return tier.is_up and is_readable and self.index.holds(key, tier.name)

    def _scan(self, tier: Tier) -> list[EntryInfo]:
        """What a tier holds; nothing when it fails."""
        try:
            return list(tier.scan())
        except TIER_ERRORS as error:
            self._complain(tier, "list its entries", error)
            return []

    def _delete(self, tier: Tier, keys: Sequence[ChunkKey]) -> None:
        try:
            tier.delete_all(keys)
        except TIER_ERRORS as error:
            self._complain(tier, "delete", error)

    def _unreadable_reason(self, level: int, key: ChunkKey) -> MissReason | None:
        reason, until = self._unreadable.get((level, key), (None, 0.0))
        if reason is not None and time.monotonic() > until:
            self._unreadable.pop((level, key), None)
            return None
        return reason

    def _complain(self, tier: Tier, action: str, error: Exception) -> None:
        if (tier.name, action) not in self._failing and not isinstance(error, TierDownError):
            self._failing.add((tier.name, action))
            logger.warning(
                "the %s tier failed to %s (%s); going on without it for now, check its space and permissions",
                tier.name,
                action,
                error,
            )
