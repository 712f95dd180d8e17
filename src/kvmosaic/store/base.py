"""The interface of tiers, and the results of lookups."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from kvmosaic.core.entry import ChunkKV, EntryKind
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.key import ChunkKey


class MissReason(str, Enum):
    """Why a lookup found nothing."""

    NEW = "new"
    """Never stored, as far as this process knows."""
    EVICTED = "evicted"
    """This process had it and evicted it."""
    CORRUPT = "corrupt"
    """A stored copy failed its checks and was set aside."""
    COLLISION = "collision"
    """The stored entry has this key but other tokens."""
    ERROR = "error"
    """A tier failed, so it is unknown whether the entry is stored."""
    SLOW = "slow-tier"
    """Only a slow tier has it, and the lookup does not wait for slow tiers."""


class LookupResult(NamedTuple):
    """An entry and the tier it was found in, or the reason it was not."""

    entry: ChunkKV | None
    tier: str | None
    reason: MissReason | None


class Fetched(NamedTuple):
    """An entry that was brought from a slower tier."""

    entry: ChunkKV
    tier: str
    """The tier that had it."""
    is_near: bool
    """Whether the fastest tier has it now."""


class EntryInfo(NamedTuple):
    """One stored entry. ``tier`` is the fastest tier that holds it, ``nbytes`` its size there."""

    key: ChunkKey
    nbytes: int
    tier: str
    pinned: bool
    since: float | None = None
    """Time it was stored, if known, in seconds since 1970."""
    hits: int | None = None
    """Number of lookups of this process that found it; from a tier, number of reads by engines, if it counts them."""
    kind: EntryKind | None = None


class CorruptEntryError(KvmosaicError):
    """A stored copy differs from the entry that was put. It is never served."""


TIER_ERRORS = (OSError, MemoryError, RuntimeError)
"""Exceptions that a tier may raise. torch raises runtime errors for memory that cannot be allocated or pinned."""


class TierDownError(OSError):
    """A tier as a whole cannot be used now. The code that raises it has already logged that, once."""


class Tier(ABC):
    """A place that stores entries.

    A tier only stores; the manager decides what to evict, promote or demote. All methods are called from several
    threads at once. Any of them may raise ``OSError``: the manager counts it, logs it once and continues with the
    other tiers.
    """

    name: str
    capacity: int | None
    """Byte budget that the manager enforces; ``None`` for a tier that evicts entries by itself."""
    is_far: bool = False
    """Whether a call takes a round trip to another machine. Such a tier is asked about many keys at once, and never
    with a lock held."""
    shares_budget: bool = False
    """Whether other processes use the same budget. Such a tier is listed again from time to time."""
    is_slow: bool = True
    """Whether it is outside this process. A call may take long or never return, so none is made with a lock held.
    Entries outlive the process."""
    is_up: bool = True
    """Whether calls are let through."""
    set_aside: int = 0
    """Number of stored copies that failed their checks so far."""
    progress: int = 0
    """Counter that grows while a call over many entries makes progress."""

    @abstractmethod
    def size(self, key: ChunkKey) -> int | None:
        """Bytes the stored copy takes; ``None`` when there is none. Checks the place itself, which another process
        may be changing, without reading the entry."""

    @abstractmethod
    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry as it was put, or ``None``. Raises :class:`CorruptEntryError` when the stored copy fails its
        checks, after making sure that the copy is not read again."""

    @abstractmethod
    def nbytes(self, entry: ChunkKV) -> int:
        """Bytes to make room for before ``put``: never less than the copy will take."""

    @abstractmethod
    def put(self, entry: ChunkKV) -> int:
        """Store an entry, completely or not at all. Returns the bytes it takes."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> None:
        """Delete an entry. An absent entry is no error."""

    @abstractmethod
    def scan(self) -> Iterator[EntryInfo]:
        """All stored entries, oldest first if the place tells their age. ``pinned`` is always false: tiers know
        nothing about pins."""

    def prepare(self) -> None:  # noqa: B027 - memory is ready
        """Prepare the place before it is used. Raises an ``OSError`` if it cannot be used at all."""

    def call_when_up(self, call: Callable[[], None]) -> None:  # noqa: B027 - memory is never down
        """Register ``call``, which is made whenever the place can be used again after it was down."""

    def check(self) -> None:  # noqa: B027 - memory can always be reached
        """Raise an ``OSError`` if the place cannot be reached."""

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Whether each of ``keys`` is stored."""
        return [self.size(key) is not None for key in keys]

    def get_all(self, keys: Sequence[ChunkKey]) -> Iterator[tuple[ChunkKey, Callable[[], ChunkKV | None]]]:
        """For each key, in order, a function that does what :meth:`get` does. It has to be called before the next
        pair is requested. Several entries may have been read together."""
        for key in keys:
            yield key, partial(self.get, key)

    def delete_all(self, keys: Iterable[ChunkKey]) -> None:
        """Delete many entries. If some cannot be deleted, the others still are, before one error is raised."""
        failure: OSError | None = None
        for key in keys:
            try:
                self.delete(key)
            except OSError as error:  # noqa: PERF203 - the others still have to be deleted
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:  # noqa: B027 - most tiers hold nothing that needs closing
        """Release connections and other resources. Entries stay."""
