"""Entries in this process's memory."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, Tier
from kvmosaic.store.memory import POOL


def in_host_memory(entry: ChunkKV) -> ChunkKV:
    """The entry in host memory of its own: contiguous, not a view that keeps uncounted memory alive, and pinned if it
    came from an accelerator, so that it can be copied back at full speed."""
    data = entry.data
    if data.device.type == "cpu" and data.is_contiguous() and data.untyped_storage().nbytes() == data.nbytes:
        return entry
    if data.device.type != "cpu":
        copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    else:
        copy = torch.from_numpy(POOL.take(data.nbytes)).view(data.dtype).view(data.shape)
    return replace(entry, data=copy.copy_(data))


def in_pinned_memory(entry: ChunkKV) -> ChunkKV:
    """The entry in memory that a GPU can read directly."""
    return entry if entry.data.is_pinned() else replace(entry, data=entry.data.pin_memory())


def taken_bytes(data: torch.Tensor) -> int:
    """Bytes of host memory that a tensor takes, or will take when it is copied there. Tensors from an accelerator go
    to pinned memory, which torch allocates in powers of two."""
    is_pinned = data.device.type != "cpu" or data.is_pinned()
    return 1 << (data.nbytes - 1).bit_length() if is_pinned and data.nbytes else data.nbytes


class HostTier(Tier):
    """A dictionary of entries. Single operations on it are atomic, so it needs no lock."""

    name = "host"
    is_slow = False

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[ChunkKey, ChunkKV] = {}
        self._sizes: dict[ChunkKey, int] = {}

    def size(self, key: ChunkKey) -> int | None:
        return self._sizes.get(key)

    def get(self, key: ChunkKey) -> ChunkKV | None:
        return self._entries.get(key)

    def nbytes(self, entry: ChunkKV) -> int:
        return taken_bytes(entry.data)

    def put(self, entry: ChunkKV) -> int:
        kept = in_host_memory(entry)
        size = taken_bytes(kept.data)
        self._entries[entry.key] = kept
        self._sizes[entry.key] = size  # last: a reader that sees a size finds the entry
        return size

    def delete(self, key: ChunkKey) -> None:
        self._sizes.pop(key, None)
        self._entries.pop(key, None)

    def scan(self) -> Iterator[EntryInfo]:
        for key, size in list(self._sizes.items()):
            yield EntryInfo(key, size, self.name, pinned=False)
