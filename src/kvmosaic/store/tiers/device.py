"""Entries in one block of accelerator memory that is set aside once, at start."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from errno import ENOSPC
from typing import NamedTuple

import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, Tier

ALIGNMENT = 256
"""Bytes; every entry starts at a multiple of it."""


class _Held(NamedTuple):
    start: int
    entry: ChunkKV
    written: torch.cuda.Event | None
    """When its data is there, if it was written beside the main stream."""


class DeviceTier(Tier):
    """Entries side by side in a pool, first fit. An entry read from here is a view of the pool: use it on the main
    stream (that of the thread that made the tier) while its key is pinned, or before anything else is put.

    Other threads may put entries on streams of their own: those wait for what the main stream was given so far, as
    it may still read what was in that place, and the main stream waits for them."""

    name = "device"

    def __init__(self, pool: torch.Tensor) -> None:
        """``pool`` is ``[bytes]`` uint8."""
        self.capacity: int | None = pool.numel()
        self._pool = pool
        self._entries: dict[ChunkKey, _Held] = {}
        self._main_stream = torch.cuda.current_stream(pool.device) if pool.is_cuda else None
        self._main_thread = threading.get_ident()
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
        if self._main_stream is not None and not self._wait_for_main_stream() and held.written is not None:
            self._main_stream.wait_event(held.written)
        return held.entry

    def nbytes(self, entry: ChunkKV) -> int:
        return _aligned(entry.nbytes)

    def put(self, entry: ChunkKV) -> int:
        with self._lock:
            start = self._take(_aligned(entry.nbytes))
            place = self._pool[start : start + entry.nbytes].view(entry.format.dtype).view(entry.data.shape)
            beside = self._wait_for_main_stream()
            place.copy_(entry.data, non_blocking=True)
            written = torch.cuda.current_stream().record_event() if beside else None
            self._entries[entry.key] = _Held(start, replace(entry, data=place), written)
        return _aligned(entry.nbytes)

    def delete(self, key: ChunkKey) -> None:
        with self._lock:
            held = self._entries.pop(key, None)
            if held is None:
                return
            gaps = sorted([*self._free, (held.start, held.start + _aligned(held.entry.nbytes))])
            self._free = [gaps[0]]
            for gap in gaps[1:]:
                if gap[0] == self._free[-1][1]:
                    self._free[-1] = (self._free[-1][0], gap[1])
                else:
                    self._free.append(gap)

    def scan(self) -> Iterator[EntryInfo]:
        for key, held in list(self._entries.items()):
            yield EntryInfo(key, _aligned(held.entry.nbytes), self.name, pinned=False)

    def _wait_for_main_stream(self) -> bool:
        """Whether the calling thread has another stream, which then goes on behind the main one."""
        if self._main_stream is None or threading.get_ident() == self._main_thread:
            return False
        torch.cuda.current_stream().wait_stream(self._main_stream)
        return True

    def _take(self, nbytes: int) -> int:
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                rest = (start + nbytes, end)
                self._free[index : index + 1] = [rest] if rest[0] < rest[1] else []
                return start
        raise OSError(ENOSPC, f"no gap of {nbytes} bytes in the device pool")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
