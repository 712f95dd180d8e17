"""The device pool, in ordinary memory. The code is the same wherever the pool is."""

import random

import torch
from store_helpers import make_entry, same

from kvmosaic.store import ChunkStorageManager, HostTier
from kvmosaic.store.tiers.device import DeviceTier

ONE = DeviceTier(torch.empty(0, dtype=torch.uint8)).nbytes(make_entry(0))


def test_random_use_never_overlaps_and_returns_every_byte() -> None:
    """Entries of many sizes come and go, and stored ones always equal those that were put."""
    tier = DeviceTier(torch.empty(20 * ONE, dtype=torch.uint8))
    held = {}
    chance = random.Random(random.randrange(2**31))
    for number in range(600):
        if held and chance.random() < 0.45:
            tier.delete(held.pop(chance.choice(list(held))).key)
        else:
            entry = make_entry(number, tokens=chance.randint(1, 9))
            try:
                tier.put(entry)
            except OSError:
                continue
            held[number] = entry
        for entry in held.values():
            stored = tier.get(entry.key)
            assert stored is not None
            assert same(stored, entry)
    for entry in held.values():
        tier.delete(entry.key)
    assert tier._free == [(0, 20 * ONE)]


def test_evicted_entries_are_demoted_as_they_were() -> None:
    """An evicted entry's memory is reused at once, and its copy in the next tier must not change."""
    device = DeviceTier(torch.empty(3 * ONE, dtype=torch.uint8))
    store = ChunkStorageManager([device, HostTier(2**30)])
    entries = [make_entry(number) for number in range(12)]
    for entry in entries:
        store.put(entry)
    store.flush()
    for entry in random.sample(entries, len(entries)):
        found = store.lookup(entry.key, entry.tokens, entry.context)
        assert found.entry is not None
        assert same(found.entry, entry)
    assert store.get_stats()["hits_by_tier"]["host"] > 0


def test_an_entry_found_below_is_handed_out_from_the_pool() -> None:
    store = ChunkStorageManager([DeviceTier(torch.empty(ONE, dtype=torch.uint8)), HostTier(2**30)])
    first, second = make_entry(1), make_entry(2)
    store.put(first)
    store.put(second)  # takes the only room
    store.flush()
    found = store.lookup(first.key, first.tokens, first.context)
    assert found.tier == "host"
    assert store.lookup(first.key, first.tokens, first.context).tier == "device"
