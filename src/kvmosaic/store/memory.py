"""Reuses host memory for entries. The system clears fresh memory page by page when it is first written, which takes
about as long as receiving a value."""

import ctypes
import weakref

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SMALLEST = 2**20
"""Minimum bytes of pooled memory. Smaller arrays come from the allocator, which reuses such memory itself."""
KEPT_BYTES = 256 * 2**20
"""Maximum unused memory that is kept, in bytes."""
SLACK = 1 / 8
"""Maximum excess of reused memory over the requested size, as a share of that size."""


class MemoryPool:
    """Keeps the memory of arrays that were freed. Takes no lock: an array may be freed at any moment in any thread,
    also in one that is executing a method of the pool."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: dict[int, Bytes] = {}
        """Unused memory by address, oldest first."""

    def take(self, nbytes: int) -> Bytes:
        """An uninitialized array of ``nbytes`` bytes. Its memory is reused when the array and all views and tensors
        of it are freed."""
        if nbytes < SMALLEST:
            return np.empty(nbytes, np.uint8)
        memory = self._find(nbytes)
        if memory is None:
            # numpy asks for huge pages for large arrays; torch.empty does not and is several times slower to fill.
            memory = np.empty(nbytes, np.uint8)
        # Every view of a numpy array refers to the array that owns the memory, so a separate owner has to notice when
        # the last view is freed.
        owner = (ctypes.c_ubyte * nbytes).from_buffer(memory.data)
        weakref.finalize(owner, self._keep, memory).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    def _find(self, nbytes: int) -> Bytes | None:
        """The smallest unused memory that fits."""
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
"""The pool of this process."""
