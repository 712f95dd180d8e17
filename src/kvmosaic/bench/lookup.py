"""Time of a lookup, which should not depend on the number of entries."""

import random
import statistics
import time
from typing import Any

import torch

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey, content_hash
from kvmosaic.store import ChunkStorageManager, HostTier

SIZES = (10**2, 10**3, 10**4, 10**5)
LOOKUPS = 20_000


def run() -> dict[str, Any]:
    """Median µs of a hit and of a miss in the host tier, over random keys, by number of entries."""
    rows = [_measure(entries) for entries in SIZES]
    return {"rows": rows, "ratio_1e5_over_1e2": rows[-1]["hit_us"] / rows[0]["hit_us"]}


def _key(number: int) -> ChunkKey:
    return ChunkKey(content_hash((number,)), 1, "bench-model", "bench-format")


def _measure(entries: int) -> dict[str, Any]:
    store = ChunkStorageManager([HostTier(2**30)])
    data = torch.zeros(1, 2)
    for number in range(entries):
        store.put(ChunkKV(_key(number), (number,), (), KVFormat(1, 1, 1, 1, torch.float32), data))
    rng = random.Random(0)
    hits = [rng.randrange(entries) for _ in range(LOOKUPS)]
    misses = [entries + rng.randrange(entries) for _ in range(LOOKUPS)]
    row = {"entries": entries, "hit_us": _median_us(store, hits), "miss_us": _median_us(store, misses)}
    stats = store.get_stats()
    assert (stats["cache_hits"], stats["cache_misses"]) == (LOOKUPS, LOOKUPS)
    return row


def _median_us(store: ChunkStorageManager, numbers: list[int]) -> float:
    times = []
    for number in numbers:
        key, tokens = _key(number), (number,)  # created for every lookup, as for a request
        start = time.perf_counter_ns()
        store.lookup(key, tokens, ())
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000
