"""What a tier is, and what a lookup answers."""

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
    """The key is there, but for other tokens."""
    ERROR = "error"
    """A tier failed, so nobody knows."""
    SLOW = "slow-tier"
    """Only a tier has it that was not to be waited for."""


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
    """One stored entry; ``tier`` is the fastest one that holds it, ``nbytes`` what it takes there."""

    key: ChunkKey
    nbytes: int
    tier: str
    pinned: bool
    since: float | None = None
    """When it was stored, as far as is known, in seconds since 1970."""
    hits: int | None = None
    """Number of lookups of this process that found it. From a tier: of reads by engines, where the tier counts."""
    kind: EntryKind | None = None


class CorruptEntryError(KvmosaicError):
    """A stored copy is not what was put; it is never served."""


TIER_ERRORS = (OSError, MemoryError, RuntimeError)
"""What a tier may raise: torch has runtime errors for memory that cannot be had or pinned."""


class TierDownError(OSError):
    """A tier as a whole cannot be used now. Whoever raises it has told the user so, once."""


class Tier(ABC):
    """A place entries live.

    A tier only stores. What to evict, promote or demote is the manager's business, so a tier is these
    few methods, each called from several threads at once. Any of them may raise ``OSError``: the
    manager counts it, logs it once and goes on with the other tiers.
    """

    name: str
    capacity: int | None
    """Byte budget the manager keeps this tier within; ``None`` for a tier that looks after itself."""
    is_far: bool = False
    """Whether asking takes a round trip to another machine: then it is asked about many keys at once, and never
    while others wait for a lock."""
    shares_budget: bool = False
    """Whether other processes use up the same budget: then what is there is counted anew from time to time."""
    is_slow: bool = True
    """Whether it is outside of this process: a call may take long, or for ever, so it is none of those that others
    wait for with a lock held; and entries outlive the process."""
    is_up: bool = True
    """Whether calls are let through at all."""
    set_aside: int = 0
    """Stored copies that failed their checks so far."""
    progress: int = 0
    """Grows while a call gets on that goes through many entries."""

    @abstractmethod
    def size(self, key: ChunkKey) -> int | None:
        """Bytes the stored copy takes; ``None`` when there is none. Asked of the place itself, which
        another process may be changing, and without reading the entry."""

    @abstractmethod
    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry as it was put, or ``None``. Raises :class:`CorruptEntryError` when the stored copy
        fails its checks, after seeing to it that it is not met again."""

    @abstractmethod
    def nbytes(self, entry: ChunkKV) -> int:
        """Bytes to make room for before ``put``: never less than the copy will take."""

    @abstractmethod
    def put(self, entry: ChunkKV) -> int:
        """Store an entry, all of it or nothing; the bytes it now takes."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> None:
        """Drop an entry; one that is not there is no error."""

    @abstractmethod
    def scan(self) -> Iterator[EntryInfo]:
        """Every entry that is there, oldest first (``pinned`` is always false: a tier knows no pins)."""

    def prepare(self) -> None:  # noqa: B027 - memory is ready
        """Make the place ready, before it is used. Raises an ``OSError`` if it cannot be used at all."""

    def call_when_up(self, call: Callable[[], None]) -> None:  # noqa: B027 - memory is never down
        """Have ``call`` made whenever the place can be used again after it was down."""

    def check(self) -> None:  # noqa: B027 - memory can always be reached
        """Raise an ``OSError`` if the place cannot be reached."""

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of ``keys`` are there."""
        return [self.size(key) is not None for key in keys]

    def get_all(self, keys: Sequence[ChunkKey]) -> Iterator[tuple[ChunkKey, Callable[[], ChunkKV | None]]]:
        """For each key in turn what :meth:`get` does, to be called before the next one is asked for. Some may have
        been read together."""
        for key in keys:
            yield key, partial(self.get, key)

    def delete_all(self, keys: Iterable[ChunkKey]) -> None:
        """Drop many entries; if some cannot be, all others are, before one error is raised."""
        failure: OSError | None = None
        for key in keys:
            try:
                self.delete(key)
            except OSError as error:  # noqa: PERF203 - the others have to go all the same
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:  # noqa: B027 - most tiers hold nothing that needs closing
        """Let go of connections and the like. Entries stay."""
