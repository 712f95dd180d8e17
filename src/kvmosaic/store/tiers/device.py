"""Entries in one block of accelerator memory that is set aside once, at start."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC

import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, Tier

ALIGNMENT = 256
"""Bytes; every entry starts at a multiple of it."""


class DeviceTier(Tier):
    """Entries side by side in a pool, first fit. An entry read from here is a view of the pool: it is good until
    the next write to this tier, so use it on the stream that writes are issued on, before any."""

    name = "device"

    def __init__(self, pool: torch.Tensor) -> None:
        """``pool`` is ``[bytes]`` uint8."""
        self.capacity: int | None = pool.numel()
        self._pool = pool
        self._entries: dict[ChunkKey, tuple[int, ChunkKV]] = {}
        self._free: list[tuple[int, int]] = [(0, pool.numel())]
        """Gaps as ``(start, end)``, ascending, never adjacent."""
        self._lock = threading.Lock()

    def size(self, key: ChunkKey) -> int | None:
        held = self._entries.get(key)
        return None if held is None else _aligned(held[1].nbytes)

    def get(self, key: ChunkKey) -> ChunkKV | None:
        held = self._entries.get(key)
        return None if held is None else held[1]

    def nbytes(self, entry: ChunkKV) -> int:
        return _aligned(entry.nbytes)

    def put(self, entry: ChunkKV) -> int:
        with self._lock:
            start = self._take(_aligned(entry.nbytes))
            place = self._pool[start : start + entry.nbytes].view(entry.format.dtype).view(entry.data.shape)
            place.copy_(entry.data, non_blocking=True)
            self._entries[entry.key] = (start, replace(entry, data=place))
        return _aligned(entry.nbytes)

    def delete(self, key: ChunkKey) -> None:
        with self._lock:
            start, entry = self._entries.pop(key, (0, None))
            if entry is None:
                return
            gaps = sorted([*self._free, (start, start + _aligned(entry.nbytes))])
            self._free = [gaps[0]]
            for gap in gaps[1:]:
                if gap[0] == self._free[-1][1]:
                    self._free[-1] = (self._free[-1][0], gap[1])
                else:
                    self._free.append(gap)

    def scan(self) -> Iterator[EntryInfo]:
        for key, (_, entry) in list(self._entries.items()):
            yield EntryInfo(key, _aligned(entry.nbytes), self.name, pinned=False)

    def _take(self, nbytes: int) -> int:
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                rest = (start + nbytes, end)
                self._free[index : index + 1] = [rest] if rest[0] < rest[1] else []
                return start
        raise OSError(ENOSPC, f"no gap of {nbytes} bytes in the device pool")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
