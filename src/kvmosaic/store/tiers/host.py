"""Entries in this process's memory."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, Tier
from kvmosaic.store.memory import POOL


def in_host_memory(entry: ChunkKV) -> ChunkKV:
    """The entry with host memory of its own: contiguous, not a view that keeps more alive than the budget knows
    of, and pinned if it came from a GPU, so that it can go back at full speed."""
    data = entry.data
    if data.device.type == "cpu" and data.is_contiguous() and data.untyped_storage().nbytes() == data.nbytes:
        return entry
    if data.is_cuda:
        copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    else:
        copy = torch.from_numpy(POOL.take(data.nbytes)).view(data.dtype).view(data.shape)
    return replace(entry, data=copy.copy_(data))


def in_pinned_memory(entry: ChunkKV) -> ChunkKV:
    """The entry in memory that a GPU can read directly."""
    return entry if entry.data.is_pinned() else replace(entry, data=entry.data.pin_memory())


class HostTier(Tier):
    """A dictionary of entries. Single operations on it are atomic, so it needs no lock."""

    name = "host"
    lasts = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[ChunkKey, ChunkKV] = {}

    def size(self, key: ChunkKey) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.nbytes

    def get(self, key: ChunkKey) -> ChunkKV | None:
        return self._entries.get(key)

    def nbytes(self, entry: ChunkKV) -> int:
        return entry.nbytes

    def put(self, entry: ChunkKV) -> int:
        self._entries[entry.key] = in_host_memory(entry)
        return entry.nbytes

    def delete(self, key: ChunkKey) -> None:
        self._entries.pop(key, None)

    def scan(self) -> Iterator[EntryInfo]:
        for key, entry in list(self._entries.items()):
            yield EntryInfo(key, entry.nbytes, self.name, pinned=False)
