"""Entries in one block of accelerator memory that is reserved once, at start."""

import threading
from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC
from typing import NamedTuple

import torch

from kvmosaic.core.accelerator import accelerator_of, may_copy_later
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, Tier

ALIGNMENT = 256
"""Alignment of every entry, in bytes."""


class _Held(NamedTuple):
    start: int
    entry: ChunkKV
    stream: torch.cuda.Stream | None
    """Stream it was written on; ``None`` on a CPU."""
    written: torch.cuda.Event | None


class DeviceTier(Tier):
    """Entries side by side in a pool, first fit. An entry read from here is a view of the pool: use it on the stream
    it was read on, while its key is pinned or before anything else is put.

    Streams are synchronized: a stream that writes waits for all streams that may still read the previous contents,
    and a stream that reads waits for the one that wrote."""

    name = "device"
    is_slow = False

    def __init__(self, pool: torch.Tensor) -> None:
        """``pool`` is ``[bytes]`` uint8."""
        self.capacity: int | None = pool.numel()
        self._pool = pool
        self._entries: dict[ChunkKey, _Held] = {}
        self._readers: set[torch.cuda.Stream] = set()
        self._free: list[tuple[int, int]] = [(0, pool.numel())]
        """Gaps as ``(start, end)``, ascending, never adjacent."""
        self._lock = threading.Lock()

    def size(self, key: ChunkKey) -> int | None:
        held = self._entries.get(key)
        return None if held is None else _aligned(held.entry.nbytes)

    def get(self, key: ChunkKey) -> ChunkKV | None:
        held = self._entries.get(key)
        if held is None:
            return None
        stream = self._current_stream()
        if stream is not None and held.written is not None:
            self._readers.add(stream)
            if stream != held.stream:
                stream.wait_event(held.written)
        return held.entry

    def nbytes(self, entry: ChunkKV) -> int:
        return _aligned(entry.nbytes)

    def put(self, entry: ChunkKV) -> int:
        with self._lock:
            start = self._take(_aligned(entry.nbytes))
            place = self._pool[start : start + entry.nbytes].view(entry.format.stored_dtype).view(entry.data.shape)
            stream = self._current_stream()
            for reader in list(self._readers):
                if stream is not None and stream != reader:
                    stream.wait_stream(reader)
            place.copy_(entry.data, non_blocking=may_copy_later(entry.data, place.device))
            written = None if stream is None else stream.record_event()
            self._entries[entry.key] = _Held(start, replace(entry, data=place), stream, written)
        return _aligned(entry.nbytes)

    def delete(self, key: ChunkKey) -> None:
        with self._lock:
            held = self._entries.pop(key, None)
            if held is None:
                return
            start, end = held.start, held.start + _aligned(held.entry.nbytes)
            first = last = bisect(self._free, (start, end))
            if first > 0 and self._free[first - 1][1] == start:
                first -= 1
                start = self._free[first][0]
            if last < len(self._free) and self._free[last][0] == end:
                end = self._free[last][1]
                last += 1
            self._free[first:last] = [(start, end)]

    def scan(self) -> Iterator[EntryInfo]:
        for key, held in list(self._entries.items()):
            yield EntryInfo(key, _aligned(held.entry.nbytes), self.name, pinned=False)

    def _current_stream(self) -> torch.cuda.Stream | None:
        module = accelerator_of(self._pool.device)
        stream: torch.cuda.Stream | None = None if module is None else module.current_stream(self._pool.device)
        return stream

    def _take(self, nbytes: int) -> int:
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                rest = (start + nbytes, end)
                self._free[index : index + 1] = [rest] if rest[0] < rest[1] else []
                return start
        raise OSError(ENOSPC, f"no gap of {nbytes} bytes in the device pool")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
