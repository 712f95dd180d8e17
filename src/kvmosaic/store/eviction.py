"""Which entries make room for new ones: S3-FIFO, counted in bytes.

New keys queue up in *small* (a tenth of the budget). A key that was used there moves on to *main*, one
that was not leaves and is remembered, without its bytes, in *ghost*; if it comes back soon it goes
straight to main. So a long run of keys used once only ever competes for a tenth of the budget. See
Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable
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
    """First in, first out, and how many bytes are queued."""

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
    """Keeps account of the keys in one tier and names the ones to evict. Does no I/O, takes no lock."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Budget in bytes."""
        self._small: _Queue[K] = _Queue()
        self._main: _Queue[K] = _Queue()
        self._ghost: _Queue[K] = _Queue()

    @property
    def nbytes(self) -> int:
        """Bytes of all keys held."""
        return self._small.nbytes + self._main.nbytes

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: K) -> bool:
        return key in self._main or key in self._small

    def touch(self, key: K) -> None:
        """Note a use of ``key``; one that is not held is ignored."""
        item = self._main.get(key) or self._small.get(key)
        if item is not None and item.uses < MAX_USES:
            item.uses += 1

    def add(self, key: K, nbytes: int) -> None:
        """Hold ``key`` from now on; :meth:`make_room` goes first."""
        if key in self:
            return
        came_back = key in self._ghost
        if came_back:
            self._ghost.take(key)
        (self._main if came_back else self._small).push(key, _Item(nbytes))

    def remove(self, key: K) -> None:
        """Forget ``key``; one that is not held is ignored."""
        for queue in (self._small, self._main):
            if key in queue:
                queue.take(key)

    def make_room(self, nbytes: int, pinned: Collection[K] = ()) -> list[K] | None:
        """Evict until ``nbytes`` more fit; the evicted keys, none of them in ``pinned``.

        ``None``, with nothing evicted, when they cannot fit.
        """
        if self.nbytes + nbytes <= self.capacity:
            return []
        if self._bytes_of(pinned) + nbytes > self.capacity:
            return None
        victims = []
        while self.nbytes + nbytes > self.capacity:
            victims.append(self._evict_one(pinned))
        return victims

    def _bytes_of(self, keys: Collection[K]) -> int:
        items = (self._main.get(key) or self._small.get(key) for key in keys)
        return sum(item.nbytes for item in items if item is not None)

    def _evict_one(self, pinned: Collection[K]) -> K:
        victim = None
        if self._small.nbytes > SMALL_SHARE * self.capacity:
            victim = self._evict_from_small(pinned)
        if victim is None:
            victim = self._evict_from_main(pinned)
        if victim is None:
            victim = self._evict_from_small(pinned)
        assert victim is not None, "make_room checked that something unpinned is left"
        return victim

    def _evict_from_small(self, pinned: Collection[K]) -> K | None:
        while self._small:
            key, item = self._small.take_oldest()
            # A pin is a use as well, and moving the key on keeps it out of the way here.
            if item.uses or key in pinned:
                item.uses = 0
                self._main.push(key, item)
                continue
            self._ghost.push(key, item)
            while self._ghost.nbytes > self.capacity:
                self._ghost.take_oldest()
            return key
        return None

    def _evict_from_main(self, pinned: Collection[K]) -> K | None:
        # One more round than a key can have uses left: after that all keys are known to be pinned.
        for _ in range(len(self._main) * (MAX_USES + 1)):
            key, item = self._main.take_oldest()
            if item.uses == 0 and key not in pinned:
                return key
            item.uses = max(0, item.uses - 1)
            self._main.push(key, item)
        return None
