"""Values of entries while they are received from a remote store."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.heads import HeadRange
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.codec import DecodedEntry, decode, max_header_bytes
from kvmosaic.store.header import MOST_CONTEXT_BYTES
from kvmosaic.store.memory import POOL, Bytes
from kvmosaic.store.remote.heads import own_spans
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
        """Memory for the KV of all values, ``[bytes]``; set when the first length is known."""
        self.key = key
        self._keys = part_keys(key)
        heads = HeadRange.parse(key.heads)
        check = check.of(key)
        self._checks = [check]
        if heads is not None:
            self._checks = [check.of_part(*span) for span in own_spans(heads)] * heads.count
        self.num_values = len(self._keys)
        self._values: dict[int, list[Bytes]] = {}
        self._refused_bytes = 0
        formats = [each.format or seen for each in self._checks]
        self._kv_bytes = [0 if each is None else each.nbytes(key.num_tokens) for each in formats]
        self._begins = [0, *accumulate(self._kv_bytes)]
        """Place of each value's KV in ``block``, in bytes."""

    def _is_possible(self, index: int, nbytes: int) -> bool:
        """Whether a value may have this length. If the format is certain, values of other lengths are not
        received."""
        kv_format, expected = self._checks[index].format, self._kv_bytes[index]
        if kv_format is None:
            return True
        besides = max_header_bytes(self._keys[index], kv_format) + 4 * self.key.num_tokens + MOST_CONTEXT_BYTES
        return expected <= nbytes <= expected + besides

    def buffers_for(self, index: int, nbytes: int) -> list[Bytes] | None:
        if not self._is_possible(index, nbytes):
            self._values.pop(index, None)
            self._refused_bytes = max(self._refused_bytes, nbytes)
            self.parts[index] = CorruptEntryError(f"{nbytes} bytes, which no entry of the engine's format has")
            return None
        small = nbytes - self._kv_bytes[index]
        if 0 < small < nbytes:
            if self.block is None:
                self.block = POOL.take(self._begins[-1])
            place = slice(*self._begins[index : index + 2])
            self._values[index] = [np.empty(small, np.uint8), self.block[place]]
        else:
            self._values[index] = [np.empty(nbytes, np.uint8)]
        return self._values[index]

    def received(self, index: int) -> None:
        if index not in self._values:  # it was not wanted
            return
        try:
            self.parts[index] = decode(self._values[index], self._keys[index], self._checks[index])
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
        return self._begins[-1]


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
