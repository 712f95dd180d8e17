"""Memory that the values of one entry are read into."""

import numpy as np

from kvmosaic.core.entry import KVFormat
from kvmosaic.store.memory import POOL, Bytes


class Incoming:
    """If the format is known from another entry, the KV of all values goes side by side into one block of memory, which
    then is the entry's; what precedes it in each value goes elsewhere. A format that turns out to be another costs a
    copy."""

    def __init__(self, count: int, kv_format: KVFormat | None, tokens: int) -> None:
        """``count`` values of an entry of ``tokens`` tokens, each probably in ``kv_format``."""
        self.values: dict[int, list[Bytes]] = {}
        """By index, the parts of each value whose length is known."""
        self.block: Bytes | None = None
        """``[count, bytes]``, when the first length is known."""
        self._count = count
        self._kv_bytes = 0
        if kv_format is not None:
            self._kv_bytes = kv_format.heads * kv_format.numbers(tokens) * kv_format.dtype.itemsize

    def buffers_for(self, index: int, nbytes: int) -> list[Bytes]:
        """Memory for the value ``index``."""
        small = nbytes - self._kv_bytes
        if 0 < small < nbytes:
            if self.block is None:
                self.block = POOL.take(self._count * self._kv_bytes).reshape(self._count, -1)
            self.values[index] = [np.empty(small, np.uint8), self.block[index]]
        else:
            self.values[index] = [np.empty(nbytes, np.uint8)]
        return self.values[index]

    def nbytes(self) -> int:
        """Bytes of all values, as far as is known: a store may tell a length only when it comes to that value, but all
        are about as long."""
        longest = max((sum(map(len, value)) for value in list(self.values.values())), default=0)
        return self._count * longest
