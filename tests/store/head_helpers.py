"""Engines of any tensor-parallel size, represented by the stores of their ranks, over one pool that stores heads
separately."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import HeadShare
from kvmosaic.store import ChunkStorageManager, LookupResult, open_store
from kvmosaic.store.remote.keys import names_of
from kvmosaic.store.tiers.remote import RemoteTier

HEADS, LAYERS = 8, 3


def share(rank: int, ranks: int, heads: int = HEADS) -> HeadShare:
    return HeadShare.of_rank(rank, ranks, heads, LAYERS)


def model_entry(number: int, heads: int = HEADS, **options: Any) -> ChunkKV:
    """All heads of a chunk."""
    return make_entry(number, heads=heads, layers=LAYERS, **options)


def of_share(entry: ChunkKV, own: HeadShare) -> ChunkKV:
    """A rank's part of an entry of the whole model."""
    heads = own.heads
    data = entry.data[heads.first : heads.last + 1].clone()
    return ChunkKV(
        replace(entry.key, heads=str(heads)),
        entry.tokens,
        entry.context,
        replace(entry.format, heads=heads.count),
        data,
    )


def opened(url: str, own: HeadShare) -> ChunkStorageManager:
    config = load_config(remote=url, per_head_storage=True, remote_deadline_ms=10_000)
    return open_store(config, share=own)


def engine(url: str, ranks: int, heads: int = HEADS) -> list[ChunkStorageManager]:
    """The stores of all ranks of an engine that was just started."""
    return [opened(url, share(rank, ranks, heads)) for rank in range(ranks)]


def close(stores: list[ChunkStorageManager]) -> None:
    for store in stores:
        store.close()


def fill(url: str, ranks: int, entries: list[ChunkKV]) -> None:
    """Store an entry as an engine of ``ranks`` ranks does."""
    heads = entries[0].format.heads
    stores = engine(url, ranks, heads)
    for rank, store in enumerate(stores):
        for entry in entries:
            assert store.put(of_share(entry, share(rank, ranks, heads)))
    close(stores)
    assert all(store.get_stats()["write_errors"] == 0 for store in stores)


def find(store: ChunkStorageManager, entry: ChunkKV) -> LookupResult:
    return store.lookup(entry.key, entry.tokens, entry.context)


def results(url: str, ranks: int, entry: ChunkKV) -> list[LookupResult]:
    """Look-up results of each rank of a new engine. Entries that are found are checked."""
    stores = engine(url, ranks, entry.format.heads)
    found = []
    for rank, store in enumerate(stores):
        mine = of_share(entry, share(rank, ranks, entry.format.heads))
        found.append(find(store, mine))
        if found[-1].entry is not None:
            assert same(found[-1].entry, mine)
            assert found[-1].tier == "remote"
    close(stores)
    return found


def names(tier: RemoteTier) -> list[str]:
    return sorted(name for page in tier._client.scan("") for name in page)


def head_name(entry: ChunkKV, head: int) -> str:
    return names_of(of_share(entry, share(0, 1)).key)[head]


class Raw:
    """Receives a value unchanged."""

    def buffers_for(self, index: int, nbytes: int) -> list[Any]:
        self.value = np.empty(nbytes, np.uint8)
        return [self.value]

    def received(self, index: int) -> None:
        pass


def change(tier: RemoteTier, name: str, damage: Callable[[bytearray], None]) -> None:
    """Alter a stored value."""
    incoming = Raw()
    tier._client.get_into([name], incoming)
    value = bytearray(incoming.value.tobytes())
    damage(value)
    plant(tier, name, value)


def plant(tier: RemoteTier, name: str, value: bytes | bytearray) -> None:
    tier._client.delete([name])
    assert tier._client.put([name], [lambda: [memoryview(bytes(value))]]) == [None]
