"""Random operations of one process on a store until it is killed. Each operation is checked at once.

Facts that the parent needs survive the process, because they are in a file that both have mapped (``Ledger``).
"""

import math
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import ChunkStorageManager, open_store
from tests.store.store_helpers import make_entry, same

ENTRIES = 160
"""Number of different entries. The first quarter belongs to the first process, the second quarter to the other, and
the rest is shared."""
OWN = ENTRIES // 4
HOST_ENTRIES = 80
DEADLINE_MS = 2000
_ROWS = ("kept", "cleared", "gone", "held")


class Ledger:
    """Facts about each entry from one process, in a file that outlives it. Times are those of ``time.monotonic``."""

    def __init__(self, path: Path) -> None:
        size = len(_ROWS) * ENTRIES + 3
        if not path.exists():
            np.zeros(size).tofile(path)
        self._all = np.asarray(np.memmap(path, np.float64, "r+", shape=(size,)))  # faster than its subclass
        rows = self._all[3:].reshape(len(_ROWS), ENTRIES)
        self.kept, self.cleared, self.gone, self.held = rows
        """``kept``: time at which the store was asked and said that the entry lasts. ``cleared``: time at which the
        latest removal ended; infinite during a removal. ``gone``: time at which it was removed; 0 from before the
        next put. ``held``: like ``kept``, but only while the entry is also pinned."""

    def count(self, operations: int, found: int, wrong: int) -> None:
        """Add to the counts."""
        self._all[:3] += operations, found, wrong

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of operations, of entries found, and of wrong ones among them."""
        operations, found, wrong = self._all[:3]
        return int(operations), int(found), int(wrong)

    def end(self) -> None:
        """Note that the process has ended. Entries that it was removing may or may not be there."""
        self.cleared[np.isinf(self.cleared)] = time.monotonic()


@dataclass(frozen=True)
class Place:
    """Place of a process's entries."""

    root: Path
    disk: int | None
    """Byte budget of the disk tier; ``None``: no disk tier."""
    tenant: str
    has_quota: bool
    """Whether the budget is a quota of this tenant."""
    remote: str | None

    def open(self) -> ChunkStorageManager:
        """Open the store as engines do."""
        settings: dict[str, Any] = {"tenant": self.tenant, "host_memory": HOST_ENTRIES * self.entry(0).nbytes}
        if self.disk is not None:
            settings |= {"disk_path": self.root, "disk_space": self.disk}
            settings |= {"tenant_quota": self.disk} if self.has_quota else {}
        if self.remote is not None:
            settings |= {"remote": self.remote, "remote_deadline_ms": DEADLINE_MS}
        return open_store(load_config(**settings))

    def entry(self, number: int) -> ChunkKV:
        """A tiny entry, of one of three sizes."""
        return make_entry(number, tokens=2 + number % 3, tenant=self.tenant)


class Operations:
    """The operations of one process, drawn from its seed."""

    def __init__(self, place: Place, ledger: Ledger, who: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._ledger, self._who = ledger, who
        self._entries = [place.entry(number) for number in range(ENTRIES)]
        self._numbers = {entry.key: number for number, entry in enumerate(self._entries)}
        # With a quota, all entries belong to this process; otherwise all except the other process's.
        others = range(OWN * (1 - who), OWN * (2 - who)) if not place.has_quota else ()
        self._usable = [number for number in range(ENTRIES) if number not in others]
        self._open = place.open
        self._store = place.open()
        self._pins: dict[int, AbstractContextManager[None]] = {}
        self._fetches = ThreadPoolExecutor(1)
        self._kinds: list[tuple[Callable[[], None], float]] = [
            (self._look_up, 1.0),
            (self._put, 0.04),
            (self._fetch, 0.005),
            (self._contains, 0.02),
            (self._pin, 0.01),
            (self._unpin, 0.003),
            (self._remove, 0.001),
            (self._keep, 0.002),
            (self._hold, 0.004),
            (self._flush, 0.001),
            (self._remove_many, 0.0001),
            (self._restart, 0.0002),
        ]

    def go_on(self, count: int) -> None:
        """Do ``count`` operations."""
        for kind in self._random.choices(*zip(*self._kinds, strict=True), k=count):
            kind()
            self._ledger.count(1, 0, 0)

    def close(self) -> None:
        for number in list(self._pins):
            self._release(number)
        self._fetches.shutdown()
        self._store.close()

    def _any(self) -> int:
        """A random entry. Few are popular, as with documents."""
        return self._usable[int(len(self._usable) * self._random.random() ** 3)]

    def _look_up(self) -> None:
        wanted = self._entries[self._any()]
        found = self._store.lookup(wanted.key, wanted.tokens, wanted.context).entry
        if found is not None:
            self._ledger.count(0, 1, not same(found, wanted))

    def _put(self) -> None:
        number = self._any()
        self._ledger.gone[number] = 0.0
        self._store.put(self._entries[number])

    def _fetch(self) -> None:
        """Fetch in another thread, as engines do."""
        keys = [self._entries[self._any()].key for _ in range(4)]
        self._fetches.submit(self._store.fetch, keys)

    def _contains(self) -> None:
        self._store.contains(self._entries[self._any()].key)

    def _pin(self) -> None:
        """Pin entries, including unpopular ones, which would be evicted first."""
        number = self._random.choice(self._usable)
        if number not in self._pins and len(self._pins) < 5:
            self._pins[number] = self._store.pin([self._entries[number].key])
            self._pins[number].__enter__()

    def _unpin(self) -> None:
        if self._pins:
            self._release(self._random.choice(list(self._pins)))

    def _release(self, number: int) -> None:
        self._ledger.held[number] = 0.0
        self._pins.pop(number).__exit__(None, None, None)

    def _hold(self) -> None:
        """Check that pinned and lasting entries stay, however full the store is."""
        for number in self._pins:
            self._ledger.gone[number] = 0.0
            self._store.put(self._entries[number])
        self._note(self._pins, self._ledger.held)

    def _keep(self) -> None:
        for _ in range(6):
            self._put()
        self._note(self._usable, self._ledger.kept)

    def _note(self, numbers: Iterable[int], row: np.ndarray) -> None:
        now = time.monotonic()
        for key in self._store.lasting([self._entries[number].key for number in numbers]):
            row[self._numbers[key]] = now

    def _remove(self) -> None:
        self._removing([self._any()])

    def _remove_many(self) -> None:
        self._removing(number for number in self._usable if number % 8 == self._random.randrange(8))

    def _removing(self, numbers: Iterable[int]) -> None:
        chosen = list(numbers)
        keys: set[ChunkKey] = {self._entries[number].key for number in chosen}
        self._ledger.held[chosen] = 0.0
        self._ledger.cleared[chosen] = math.inf
        self._store.clear(lambda key: key in keys)
        self._store.flush()
        self._ledger.cleared[chosen] = self._ledger.gone[chosen] = time.monotonic()

    def _flush(self) -> None:
        self._store.flush()

    def _restart(self) -> None:
        """Close and open the store again. Pins end with the process."""
        self.close()
        self._fetches = ThreadPoolExecutor(1)
        self._store = self._open()


def operate(place: Place, ledger: Path, who: int, seed: int, count: int) -> None:
    """Entry point of the process: ``count`` operations, if it lives that long."""
    operations = Operations(place, Ledger(ledger), who, seed)
    operations.go_on(count)
    operations.close()
