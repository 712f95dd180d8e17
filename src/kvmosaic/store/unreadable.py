"""Copies that could not be read."""

import threading
import time
from collections.abc import Callable

from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import MissReason

ERROR_SECONDS = 30.0
"""Seconds until a copy that could not be read is tried again, unless it is corrupt."""
REMEMBERED = 10_000
"""Maximum number of copies that are remembered. The oldest one is forgotten, and so tried again."""


class Unreadable:
    """Copies whose last read failed, with the reason and a time limit. They count as absent until that time, or until
    they are written again."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ChunkKey], tuple[MissReason, float]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._copies)

    def note(self, level: int, key: ChunkKey, reason: MissReason) -> None:
        """Note that a copy could not be read. A corrupt one is not tried again."""
        until = float("inf") if reason is MissReason.CORRUPT else time.monotonic() + ERROR_SECONDS
        with self._lock:
            self._copies.pop((level, key), None)
            self._copies[level, key] = reason, until
            if len(self._copies) > REMEMBERED:
                del self._copies[next(iter(self._copies))]

    def reason(self, level: int, key: ChunkKey) -> MissReason | None:
        """Why a copy must not be read now; ``None`` if it may be."""
        reason, until = self._copies.get((level, key), (None, 0.0))
        if reason is not None and time.monotonic() > until:
            self.written(level, key)
            return None
        return reason

    def written(self, level: int, key: ChunkKey) -> None:
        """Note that there is a new copy."""
        with self._lock:
            self._copies.pop((level, key), None)

    def forget(self, matching: Callable[[ChunkKey], bool]) -> None:
        """Forget ``matching`` copies, which are to be deleted."""
        with self._lock:
            self._copies = {place: why for place, why in self._copies.items() if not matching(place[1])}
