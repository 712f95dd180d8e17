"""The index of this process: the tiers, sizes and pins of every key."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvmosaic.core.entry import EntryKind
from kvmosaic.core.key import ChunkKey

REMEMBERED_EVICTIONS = 100_000


@dataclass(slots=True)
class IndexRecord:
    """Where one entry is held."""

    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes it takes, by name of the tier that holds it."""
    since: float = field(default_factory=time.time)
    """Time it was stored, or first seen if that is unknown, in seconds since 1970."""
    hits: int = 0
    """Number of counted lookups that found it."""
    kind: EntryKind | None = None


class ChunkHashIndex:
    """Maps a :class:`ChunkKey` to its record; every operation on one key is O(1). Takes no lock."""

    def __init__(self) -> None:
        self.pins: dict[ChunkKey, int] = {}
        """Number of pins of each pinned key. A key can be pinned before it is stored."""
        self._records: dict[ChunkKey, IndexRecord] = {}
        self._evicted: OrderedDict[ChunkKey, None] = OrderedDict()
        self._changed: set[ChunkKey] | None = None

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[tuple[ChunkKey, IndexRecord]]:
        return iter(self._records.items())

    def lookup(self, key: ChunkKey) -> IndexRecord | None:
        """The record of ``key``, or ``None`` when no tier is known to hold it."""
        return self._records.get(key)

    def holds(self, key: ChunkKey, tier: str) -> bool:
        """Whether ``tier`` is known to hold ``key``."""
        record = self._records.get(key)
        return record is not None and tier in record.nbytes

    def insert(self, key: ChunkKey, tier: str, nbytes: int) -> None:
        """Note that ``tier`` holds ``key`` and that it takes ``nbytes`` there."""
        self._records.setdefault(key, IndexRecord()).nbytes[tier] = nbytes
        self._evicted.pop(key, None)
        self._note_change(key)

    def describe(self, key: ChunkKey, kind: EntryKind | None, *, since: float | None = None, hits: int = 0) -> None:
        """Note the kind of an entry, when it was stored, and ``hits`` more lookups that found it. Does nothing if no
        tier is known to hold it."""
        record = self._records.get(key)
        if record is None:
            return
        record.kind = record.kind or kind
        record.since = record.since if since is None else since
        record.hits += hits

    def remove(self, key: ChunkKey, tier: str, evicted: bool = False) -> None:
        """Note that ``tier`` no longer holds ``key``. An eviction of the last copy is remembered for a while."""
        record = self._records.get(key)
        if record is None:
            return
        record.nbytes.pop(tier, None)
        self._note_change(key)
        if record.nbytes:
            return
        del self._records[key]
        if evicted:
            self._evicted[key] = None
            if len(self._evicted) > REMEMBERED_EVICTIONS:
                self._evicted.popitem(last=False)

    def take_changes(self) -> set[ChunkKey]:
        """Keys whose record changed since the last call; at the first call, all keys."""
        changed = set(self._records) if self._changed is None else self._changed
        self._changed = set()
        return changed

    def _note_change(self, key: ChunkKey) -> None:
        if self._changed is not None:  # collect only after the first take_changes()
            self._changed.add(key)

    def was_evicted(self, key: ChunkKey) -> bool:
        """Whether the last copy of ``key`` was evicted, as far as is remembered."""
        return key in self._evicted

    def pin(self, key: ChunkKey) -> bool:
        """Pin a key once more. Returns whether it was not pinned before."""
        self.pins[key] = self.pins.get(key, 0) + 1
        return self.pins[key] == 1

    def unpin(self, key: ChunkKey) -> bool:
        """Undo one :meth:`pin`. Returns whether it was the last."""
        self.pins[key] -= 1
        if self.pins[key]:
            return False
        del self.pins[key]
        return True

    def forget_evictions(self, matching: Callable[[ChunkKey], bool]) -> None:
        """Forget that ``matching`` keys were evicted."""
        for key in [key for key in self._evicted if matching(key)]:
            del self._evicted[key]
