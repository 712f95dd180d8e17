"""The eviction policy against plain LRU, on popular chunks with long scans of one-off chunks mixed in."""

import random
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Protocol

from kvmosaic.store.eviction import S3Fifo

POPULAR = 2_000
ZIPF = 0.9
REQUESTS = 60_000
SCAN_EVERY = 4_000
SCAN_LENGTH = 2_000
CHUNK_BYTES = (8, 32)
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.4)


class Policy(Protocol):
    """The methods of a policy that the comparison needs."""

    def __contains__(self, key: int) -> bool: ...
    def touch(self, key: int) -> None: ...
    def add(self, key: int, nbytes: int) -> None: ...
    def make_room(self, nbytes: int) -> list[int] | None: ...


class LRU:
    """Evicts the least recently used chunk."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: OrderedDict[int, int] = OrderedDict()
        self._nbytes = 0

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def touch(self, key: int) -> None:
        self._held.move_to_end(key)

    def add(self, key: int, nbytes: int) -> None:
        self._held[key] = nbytes
        self._nbytes += nbytes

    def make_room(self, nbytes: int) -> list[int] | None:
        if nbytes > self.capacity:
            return None
        victims = []
        while self._nbytes + nbytes > self.capacity:
            victim = next(iter(self._held))
            self._nbytes -= self._held.pop(victim)
            victims.append(victim)
        return victims


def trace(seed: int) -> Iterator[tuple[int, int]]:
    """``(key, bytes)`` of each request: Zipf-popular keys; every so often a run of keys never seen again."""
    rng = random.Random(seed)
    sizes = [rng.randint(*CHUNK_BYTES) for _ in range(POPULAR)]
    weights = list(accumulate(1 / rank**ZIPF for rank in range(1, POPULAR + 1)))
    one_off = POPULAR
    for number, key in enumerate(rng.choices(range(POPULAR), cum_weights=weights, k=REQUESTS)):
        yield key, sizes[key]
        if number % SCAN_EVERY == SCAN_EVERY - 1:
            for _ in range(SCAN_LENGTH):
                yield one_off, rng.randint(*CHUNK_BYTES)
                one_off += 1


def replay(policy: Policy, requests: list[tuple[int, int]]) -> float:
    """Share of the requests for popular keys that hit (a one-off key cannot)."""
    hits = total = 0
    for key, nbytes in requests:
        total += key < POPULAR
        if key in policy:
            hits += 1
            policy.touch(key)
        elif policy.make_room(nbytes) is not None:
            policy.add(key, nbytes)
    return hits / total


def run(seed: int = 0) -> dict[str, Any]:
    """Hit rates of both policies at equal byte budgets (shares of the bytes of all popular chunks)."""
    requests = list(trace(seed))
    popular_bytes = sum({key: nbytes for key, nbytes in requests if key < POPULAR}.values())
    rows = []
    for share in BUDGETS:
        budget = int(share * popular_bytes)
        s3fifo, lru = replay(S3Fifo[int](budget), requests), replay(LRU(budget), requests)
        rows.append({"budget_share": share, "s3fifo_hit_rate": s3fifo, "lru_hit_rate": lru})
    return {"seed": seed, "requests": len(requests), "rows": rows}
