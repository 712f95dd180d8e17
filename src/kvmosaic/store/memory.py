"""Host memory for entries that is used again: fresh memory, which the system clears page by page when it is first
written, takes about as long to get as a value takes to arrive."""

import ctypes
import weakref

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SMALLEST = 2**20
"""Bytes; less comes from the allocator, which keeps such memory itself."""
KEPT_BYTES = 256 * 2**20
"""Most memory that is kept while nothing uses it."""
SLACK = 1 / 8
"""How much larger than wanted, as a share, kept memory may be."""


class MemoryPool:
    """Keeps the memory of arrays that are gone. Takes no lock: an array may go at any moment, in any thread, also in
    one that is in here."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: dict[int, Bytes] = {}
        """By address, oldest first."""

    def take(self, nbytes: int) -> Bytes:
        """An array of ``nbytes`` bytes that hold anything. When it, and all views and tensors of it, are gone, its
        memory is used again."""
        if nbytes < SMALLEST:
            return np.empty(nbytes, np.uint8)
        memory = self._find(nbytes)
        if memory is None:
            # numpy asks for huge pages for large arrays; torch.empty does not and is several times slower to fill.
            memory = np.empty(nbytes, np.uint8)
        # Every view of a numpy array refers to the array that owns the memory, so only something else can tell when
        # the last one is gone.
        owner = (ctypes.c_ubyte * nbytes).from_buffer(memory.data)
        weakref.finalize(owner, self._keep, memory).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    def _find(self, nbytes: int) -> Bytes | None:
        """The tightest that fits."""
        fitting = {
            address: len(memory)
            for address, memory in self._kept.copy().items()
            if nbytes <= len(memory) <= nbytes * (1 + SLACK)
        }
        return self._kept.pop(min(fitting, key=fitting.__getitem__), None) if fitting else None

    def _keep(self, memory: Bytes) -> None:
        self._kept[memory.ctypes.data] = memory
        excess = sum(map(len, self._kept.copy().values())) - self._kept_bytes
        for address in list(self._kept):
            if excess <= 0:
                return
            gone = self._kept.pop(address, None)
            excess -= 0 if gone is None else len(gone)


POOL = MemoryPool()
"""Of this process."""
