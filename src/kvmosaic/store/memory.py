"""Host memory for entries that is used again: fresh memory, which the system clears page by page when it is first
written, takes about as long to get as a value takes to arrive."""

import ctypes
import threading
import weakref
from collections import deque

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
    """Keeps the memory of arrays that are gone, the last ones first."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: deque[Bytes] = deque()
        self._lock = threading.Lock()

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
        weakref.finalize(owner, self._kept.append, memory).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    def _find(self, nbytes: int) -> Bytes | None:
        """Kept memory that fits, the tightest; what is too much to keep is let go. Finalizers may run at any moment,
        in any thread, and only append."""
        with self._lock:
            kept = [self._kept.popleft() for _ in range(len(self._kept))]
            fitting = [memory for memory in kept if nbytes <= len(memory) <= nbytes * (1 + SLACK)]
            found = min(fitting, key=len, default=None)
            room = self._kept_bytes
            for memory in reversed(kept):
                room -= len(memory)
                if memory is not found and room >= 0:
                    self._kept.appendleft(memory)
            return found


POOL = MemoryPool()
"""Of this process."""
