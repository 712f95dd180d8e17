"""The one thread that writes entries to the slower tiers."""

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.streams import on_side_stream, record_event

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 * 1024**2


class _Job(NamedTuple):
    entry: ChunkKV
    level: int
    ready: "torch.cuda.Event | None"
    """When the entry's data is there."""


class BackgroundWriter:
    """A queue of entries on their way to slower tiers. What is queued is alive and can be looked up.

    The thread starts with the first entry and ends when the queue is empty. It is not a daemon, so a
    program that forgets to close the store still writes everything before it exits, and none hangs.
    """

    def __init__(self, write: Callable[[ChunkKV, int], None], max_bytes: int = QUEUE_BYTES) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._jobs: dict[ChunkKey, _Job] = {}
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The queued entry of ``key``."""
        job = self._jobs.get(key)
        return None if job is None else job.entry

    def add(self, entry: ChunkKV, level: int) -> None:
        """Queue ``entry`` for all tiers from ``level`` on. Never waits, so it may be called under a lock;
        call :meth:`wait_for_room` afterwards without one."""
        with self._changed:
            queued = self._jobs.get(entry.key)
            if queued is not None and queued.level <= level:
                return
            self._drop(entry.key)
            self._jobs[entry.key] = _Job(entry, level, record_event())
            self._queued_bytes += entry.nbytes
            self._start()

    def wait_for_room(self) -> None:
        """Wait while more than the queue's bytes are waiting to be written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued_bytes <= self._max_bytes)

    def flush(self, key: ChunkKey | None = None) -> None:
        """Wait until ``key``, or everything, is written or has failed."""
        with self._changed:
            if self._jobs:
                self._start()
            self._changed.wait_for(lambda: key not in self._jobs if key else not self._jobs)

    def _start(self) -> None:
        """Have a thread running; one that a fork left behind in the parent does not count."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="kvmosaic-writer")
            thread.start()
            self._thread = thread

    def _drop(self, key: ChunkKey) -> None:
        job = self._jobs.pop(key, None)
        self._queued_bytes -= job.entry.nbytes if job else 0

    def _run(self) -> None:
        while True:
            with self._changed:
                job = next(iter(self._jobs.values()), None)
                if job is None:
                    self._thread = None
                    return
            try:
                with on_side_stream(job.ready):
                    self._write(job.entry, job.level)
            except Exception:  # a dead writer would leave every later put waiting
                logger.exception("could not write entry %s; it stays in the faster tiers", job.entry.key)
            with self._changed:
                if self._jobs.get(job.entry.key) is job:  # else it was queued again for a faster tier meanwhile
                    self._drop(job.entry.key)
                self._changed.notify_all()
