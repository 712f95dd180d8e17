"""Entries in this process's memory."""

from collections.abc import Iterator

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import EntryInfo, Tier


class HostTier(Tier):
    """A dictionary of entries. Single operations on it are atomic, so it needs no lock."""

    name = "host"

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
        self._entries[entry.key] = entry
        return entry.nbytes

    def delete(self, key: ChunkKey) -> None:
        self._entries.pop(key, None)

    def scan(self) -> Iterator[EntryInfo]:
        for key, entry in list(self._entries.items()):
            yield EntryInfo(key, entry.nbytes, self.name, pinned=False)
