"""Clears that slower tiers have not carried out yet."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvmosaic.core.key import ChunkKey

Matching = Callable[[ChunkKey], bool]
"""Whether a key's entry is to be cleared. Equal ones are kept once, even if a tier that is down is cleared often."""


@dataclass(frozen=True)
class OneOf:
    """Whether a key is one of ``keys``. Such a clear does not need to list a tier."""

    keys: frozenset[ChunkKey]

    def __call__(self, key: ChunkKey) -> bool:
        return key in self.keys


class DueClears:
    """Entries that were cleared and may still be in a tier. Changed under a lock, read without one."""

    def __init__(self) -> None:
        self.count = 0
        """Number of clears so far. An entry that was read before a clear must not be stored again after it."""
        self._due: dict[int, dict[Matching, int]] = {}
        """By level: the clears that are due, each with ``count`` at its latest request. Replaced, never changed."""

    def add(self, levels: Iterable[int], matching: Matching) -> None:
        """Note that entries were cleared and have to be deleted at ``levels``."""
        self.count += 1
        for level in levels:
            self._due[level] = {**self._due.get(level, {}), matching: self.count}

    def covers(self, level: int, key: ChunkKey) -> bool:
        """Whether an entry at ``level`` counts as cleared, even if it is still there."""
        return any(matching(key) for matching in self._due.get(level, ()))

    def at(self, level: int) -> dict[Matching, int]:
        """Clears that are due at ``level``."""
        return self._due.get(level, {})

    def carried_out(self, level: int, done: dict[Matching, int]) -> None:
        """Note that the clears in ``done``, from :meth:`at`, are done. Those requested since then are still due."""
        self._due[level] = {each: count for each, count in self.at(level).items() if done.get(each) != count}
