"""Clears that slower tiers have not carried out yet."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvmosaic.core.key import ChunkKey

Matching = Callable[[ChunkKey], bool]
"""Whether a key's entry is to be cleared. Equal ones are kept once, however often a tier that is down is cleared."""


@dataclass(frozen=True)
class OneOf:
    """Whether a key is one of these, which no tier has to be listed for."""

    keys: frozenset[ChunkKey]

    def __call__(self, key: ChunkKey) -> bool:
        return key in self.keys


class DueClears:
    """Which entries of which tiers were cleared and may still be there. Changed under a lock, read without one."""

    def __init__(self) -> None:
        self.count = 0
        """How often entries were cleared: what was read before must not come back."""
        self._due: dict[int, dict[Matching, int]] = {}
        """By level, and when each was last asked for, as a count. Replaced, never changed."""

    def add(self, levels: Iterable[int], matching: Matching) -> None:
        """Entries were cleared, and have to be deleted at ``levels``."""
        self.count += 1
        for level in levels:
            self._due[level] = {**self._due.get(level, {}), matching: self.count}

    def covers(self, level: int, key: ChunkKey) -> bool:
        """Whether an entry at ``level`` is cleared, there or not."""
        return any(matching(key) for matching in self._due.get(level, ()))

    def at(self, level: int) -> dict[Matching, int]:
        """What is due at ``level``."""
        return self._due.get(level, {})

    def carried_out(self, level: int, done: dict[Matching, int]) -> None:
        """What :meth:`at` said is done; what was asked for since then is not."""
        self._due[level] = {each: count for each, count in self.at(level).items() if done.get(each) != count}
