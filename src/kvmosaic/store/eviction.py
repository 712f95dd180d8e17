"""Chooses the entries to evict: S3-FIFO, counted in bytes.

New keys enter the queue *small* (a tenth of the budget). A key that was used there moves to *main*. A key that was
not used is evicted and remembered, without its bytes, in *ghost*; if it comes back soon it goes straight to main. So
a long run of keys used once only competes for a tenth of the budget. See Yang et al., "FIFO queues are all you need
for cache eviction", SOSP 2023.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SMALL_SHARE = 0.1
MAX_USES = 3


@dataclass(slots=True)
class _Item:
    nbytes: int
    uses: int = 0


class _Queue(OrderedDict[K, _Item]):
    """A FIFO queue that counts its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def push(self, key: K, item: _Item) -> None:
        self[key] = item
        self.nbytes += item.nbytes

    def take(self, key: K) -> _Item:
        item = self.pop(key)
        self.nbytes -= item.nbytes
        return item

    def take_oldest(self) -> tuple[K, _Item]:
        key = next(iter(self))
        return key, self.take(key)


class S3Fifo(Generic[K]):
    """Tracks the keys in one tier and names those to evict. Does no I/O, takes no lock."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Budget in bytes."""
        self._small: _Queue[K] = _Queue()
        self._main: _Queue[K] = _Queue()
        self._parked: _Queue[K] = _Queue()
        """Pinned keys that an eviction found in a queue. They stay here until they are unpinned."""
        self._ghost: _Queue[K] = _Queue()
        self._pins: set[K] = set()
        """Pinned keys, held or not."""
        self._pinned_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys held."""
        return self._small.nbytes + self._main.nbytes + self._parked.nbytes

    def __len__(self) -> int:
        return len(self._small) + len(self._main) + len(self._parked)

    def __contains__(self, key: K) -> bool:
        return self._find(key) is not None

    def _find(self, key: K) -> _Item | None:
        return self._main.get(key) or self._small.get(key) or self._parked.get(key)

    def touch(self, key: K) -> None:
        """Note a use of ``key``; one that is not held is ignored."""
        item = self._find(key)
        if item is not None and item.uses < MAX_USES:
            item.uses += 1

    def pin(self, key: K) -> None:
        """Do not evict ``key``, held now or later, until it is unpinned."""
        if key not in self._pins:
            self._pins.add(key)
            item = self._find(key)
            self._pinned_bytes += item.nbytes if item else 0

    def unpin(self, key: K) -> None:
        """Undo :meth:`pin`."""
        if key in self._pins:
            self._pins.remove(key)
            item = self._find(key)
            self._pinned_bytes -= item.nbytes if item else 0
            if key in self._parked:
                self._main.push(key, self._parked.take(key))

    def can_hold(self, nbytes: int) -> bool:
        """Whether :meth:`make_room` would succeed."""
        return self._pinned_bytes + nbytes <= self.capacity

    def add(self, key: K, nbytes: int) -> None:
        """Hold ``key`` from now on. Call :meth:`make_room` first."""
        if key in self:
            return
        came_back = key in self._ghost
        if came_back:
            self._ghost.take(key)
        (self._main if came_back else self._small).push(key, _Item(nbytes))
        self._pinned_bytes += nbytes if key in self._pins else 0

    def remove(self, key: K) -> None:
        """Forget ``key``; one that is not held is ignored."""
        for queue in (self._small, self._main, self._parked):
            if key in queue:
                nbytes = queue.take(key).nbytes
                self._pinned_bytes -= nbytes if key in self._pins else 0

    def make_room(self, nbytes: int) -> list[K] | None:
        """Evict until ``nbytes`` more fit. Returns the evicted keys, none of them pinned; ``None``, with nothing
        evicted, when they cannot fit.

        An eviction takes constant time on average: a pinned key is met once, and every key that stays because it was
        used loses one use.
        """
        if self.nbytes + nbytes <= self.capacity:
            return []
        if not self.can_hold(nbytes):
            return None
        victims = []
        while self.nbytes + nbytes > self.capacity:
            victims.append(self._evict_one())
        return victims

    def _evict_one(self) -> K:
        victim = None
        if self._small.nbytes > SMALL_SHARE * self.capacity:
            victim = self._evict_from_small()
        if victim is None:
            victim = self._evict_from_main()
        if victim is None:
            victim = self._evict_from_small()
        assert victim is not None, "make_room checked that something unpinned is left"
        return victim

    def _evict_from_small(self) -> K | None:
        while self._small:
            key, item = self._small.take_oldest()
            # A pin counts as a use.
            if item.uses or key in self._pins:
                item.uses = 0
                (self._parked if key in self._pins else self._main).push(key, item)
                continue
            self._ghost.push(key, item)
            while self._ghost.nbytes > self.capacity:
                self._ghost.take_oldest()
            return key
        return None

    def _evict_from_main(self) -> K | None:
        while self._main:
            key, item = self._main.take_oldest()
            if key in self._pins:
                self._parked.push(key, item)
            elif item.uses == 0:
                return key
            else:
                item.uses -= 1
                self._main.push(key, item)
        return None
