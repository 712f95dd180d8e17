"""A wrapper for a tier that may hang, as disks do: no caller waits longer than a deadline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, Tier
from kvmosaic.store.breaker import Breaker

DEADLINE_S = 30.0
"""Deadline of a call, in seconds, plus the time to move its data. Far longer than a busy disk takes,
because no step of an engine waits for it."""
PAGE = 4096
"""Number of entries that a call lists."""


class GuardedTier(Tier):
    """Another tier behind a breaker, which opens when a call does not return. Errors do not open it: a full disk can
    still be read."""

    def __init__(self, tier: Tier, title: str) -> None:
        """``title`` is the tier's name in messages."""
        self.name, self.capacity = tier.name, tier.capacity
        self.is_far, self.shares_budget = tier.is_far, tier.shares_budget
        self._tier = tier
        self._breaker = Breaker(title, DEADLINE_S, probe=tier.check, harmless=(Exception,))

    @property
    def is_up(self) -> bool:  # type: ignore[override]
        return self._breaker.is_up

    @property
    def set_aside(self) -> int:  # type: ignore[override]
        return self._tier.set_aside

    @property
    def progress(self) -> int:  # type: ignore[override]
        return self._tier.progress

    def prepare(self) -> None:
        self._breaker.call(self._tier.prepare, progress=lambda: self._tier.progress)

    def call_when_up(self, call: Callable[[], None]) -> None:
        self._breaker.when_up = call

    def check(self) -> None:
        self._breaker.call(self._tier.check)

    def size(self, key: ChunkKey) -> int | None:
        return self._breaker.call(lambda: self._tier.size(key))

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return self._breaker.call(lambda: self._tier.holds(keys), progress=lambda: self._tier.progress)

    def get(self, key: ChunkKey) -> ChunkKV | None:
        sizes: list[int] = []

        def get() -> ChunkKV | None:
            size = self._tier.size(key)
            if size is None:
                return None
            sizes.append(size)
            return self._tier.get(key)

        return self._breaker.call(get, lambda: sum(sizes))

    def nbytes(self, entry: ChunkKV) -> int:
        return self._tier.nbytes(entry)

    def put(self, entry: ChunkKV) -> int:
        # A copy from a GPU has to be made in this thread, on its stream.
        here = replace(entry, data=entry.data.cpu())
        return self._breaker.call(lambda: self._tier.put(here), lambda: here.nbytes)

    def delete(self, key: ChunkKey) -> None:
        self._breaker.call(lambda: self._tier.delete(key))

    def delete_all(self, keys: Iterable[ChunkKey]) -> None:
        wanted = list(keys)
        self._breaker.call(lambda: self._tier.delete_all(wanted), progress=lambda: self._tier.progress)

    def scan(self) -> Iterator[EntryInfo]:
        entries = self._breaker.call(self._tier.scan)
        while page := self._breaker.call(lambda: list(islice(entries, PAGE)), progress=lambda: self._tier.progress):
            yield from page

    def close(self) -> None:
        self._breaker.close()
        self._tier.close()
