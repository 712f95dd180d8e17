"""Values of entries while they are received from a remote store."""

from collections.abc import Sequence

import numpy as np

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.heads import HeadRange
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.codec import DecodedEntry, decode, max_header_bytes
from kvmosaic.store.header import MOST_CONTEXT_BYTES
from kvmosaic.store.memory import POOL, Bytes
from kvmosaic.store.remote.keys import part_keys
from kvmosaic.store.seal import EntryCheck


class IncomingEntry:
    """Verifies each value of an entry as it arrives, while others are still being received.

    If the format is known, the KV of all values goes side by side into one block of memory, which becomes the
    entry's. The header and small tensors of each value go elsewhere. If the format turns out to be wrong, this costs
    a copy.
    """

    def __init__(self, key: ChunkKey, check: EntryCheck, seen: KVFormat | None = None) -> None:
        """``check`` has the requirements for the entry. If these do not include a format, ``seen`` is the format of
        an earlier value, and probably of these."""
        self.parts: dict[int, DecodedEntry | CorruptEntryError] = {}
        """Result of verifying each value, by its index."""
        self.block: Bytes | None = None
        """Memory for KV, ``[values, bytes]``; set when the first length is known."""
        self.key = key
        self._keys = part_keys(key)
        own = check.of(key)
        self._check = own if HeadRange.parse(key.heads) is None else own.of_one_head
        self._longest: int | None = None
        """Maximum bytes of a value, if the format is certain; longer ones are not received."""
        self.num_values = len(self._keys)
        self._values: dict[int, list[Bytes]] = {}
        self._refused_bytes = 0
        self._kv_bytes = 0
        kv_format = self._check.format or seen
        if kv_format is not None:
            self._kv_bytes = kv_format.nbytes(key.num_tokens)
        if self._check.format is not None:
            besides = max_header_bytes(self._keys[0], self._check.format) + 4 * key.num_tokens + MOST_CONTEXT_BYTES
            self._longest = self._kv_bytes + besides

    def buffers_for(self, index: int, nbytes: int) -> list[Bytes] | None:
        if self._longest is not None and not self._kv_bytes <= nbytes <= self._longest:
            self._values.pop(index, None)
            self._refused_bytes = max(self._refused_bytes, nbytes)
            self.parts[index] = CorruptEntryError(f"{nbytes} bytes, which no entry of the engine's format has")
            return None
        small = nbytes - self._kv_bytes
        if 0 < small < nbytes:
            if self.block is None:
                self.block = POOL.take(len(self._keys) * self._kv_bytes).reshape(len(self._keys), -1)
            self._values[index] = [np.empty(small, np.uint8), self.block[index]]
        else:
            self._values[index] = [np.empty(nbytes, np.uint8)]
        return self._values[index]

    def received(self, index: int) -> None:
        if index not in self._values:  # it was not wanted
            return
        try:
            self.parts[index] = decode(self._values[index], self._keys[index], self._check)
        except CorruptEntryError as error:
            self.parts[index] = error

    def nbytes(self) -> int:
        """Bytes of all values, as far as known. A store may tell a length only when it sends that value, but all
        values are about as long."""
        longest = max((sum(map(len, value)) for value in list(self._values.values())), default=0)
        return len(self._keys) * max(longest, self._refused_bytes)

    @property
    def expected_bytes(self) -> int:
        """Approximate bytes of all values, according to the format; 0 if that is unknown."""
        return self.num_values * self._kv_bytes


class IncomingEntries:
    """The values of several entries, numbered consecutively."""

    def __init__(self, entries: Sequence[IncomingEntry]) -> None:
        self._entries = entries
        self._owners = [(entry, index) for entry in entries for index in range(entry.num_values)]

    def buffers_for(self, index: int, nbytes: int) -> list[Bytes] | None:
        entry, own = self._owners[index]
        return entry.buffers_for(own, nbytes)

    def received(self, index: int) -> None:
        entry, own = self._owners[index]
        entry.received(own)

    def nbytes(self) -> int:
        return sum(entry.nbytes() for entry in self._entries)
