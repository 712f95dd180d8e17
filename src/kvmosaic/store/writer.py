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
"""Most memory of queued entries that no tier counts."""
PATIENCE_S = 60.0
"""How long those who wait for the queue do so while nothing of it gets done."""


class _Job(NamedTuple):
    entry: ChunkKV
    level: int
    ready: "torch.cuda.Event | None"
    """When the entry's data is there."""
    extra_bytes: int
    """Its memory, unless the fastest tier has the same and counts it."""


class BackgroundWriter:
    """A queue of entries on their way to slower tiers. What is queued is alive and can be looked up. Nobody ever has
    to wait for room in it: what would be too much is refused.

    The thread starts with the first entry and ends when the queue is empty. It is not a daemon, so a
    program that forgets to close the store still writes everything before it exits, and none hangs.
    """

    def __init__(
        self, write: Callable[[ChunkKV, int], None], tidy: Callable[[], None], max_bytes: int = QUEUE_BYTES
    ) -> None:
        """``write`` stores an entry in all tiers from a level on; ``tidy`` does whatever else slow tiers are due."""
        self._write = write
        self._tidy = tidy
        self._max_bytes = max_bytes
        self._jobs: dict[ChunkKey, _Job] = {}
        self._extra_bytes = 0
        self._requests = self._tidied = 0
        """For tidying, made and met."""
        self._done = 0
        """How many jobs are behind us."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The queued entry of ``key``."""
        job = self._jobs.get(key)
        return None if job is None else job.entry

    def add(self, entry: ChunkKV, level: int, is_extra: bool = True) -> bool:
        """Queue ``entry`` for all tiers from ``level`` on; whether there was room. ``is_extra``: its memory is not
        that of an entry in the fastest tier. Never waits, so it may be called under a lock."""
        with self._changed:
            queued = self._jobs.get(entry.key)
            if queued is not None and queued.level <= level:
                return True
            extra = entry.nbytes if is_extra else 0
            if not self._has_room(extra):
                return queued is not None
            self._drop(entry.key)
            self._jobs[entry.key] = _Job(entry, level, record_event(), extra)
            self._extra_bytes += extra
            self._start()
            return True

    def outlives(self, key: ChunkKey) -> bool:
        """The fastest tier lets go of a queued entry, whose memory is extra from now on; whether there is room."""
        with self._changed:
            job = self._jobs.get(key)
            if job is None or job.extra_bytes:
                return True
            self._drop(key)
            if not self._has_room(job.entry.nbytes):
                self._changed.notify_all()
                return False
            self._jobs[key] = job._replace(extra_bytes=job.entry.nbytes)
            self._extra_bytes += job.entry.nbytes
            return True

    def request_tidying(self) -> None:
        """Have ``tidy`` called soon."""
        with self._changed:
            self._requests += 1
            self._start()

    def wait_for_room(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until no more than half of the memory is taken: for those who fill on and on, and need not hurry."""
        self._wait(lambda: 2 * self._extra_bytes <= self._max_bytes, patience_s)

    def flush(self, patience_s: float = PATIENCE_S) -> int:
        """Wait until everything is written or has failed, as long as that gets on; how many entries are left."""
        return 0 if self._wait(lambda: not self._jobs and not self._is_untidy, patience_s) else len(self._jobs)

    def discard(self, matching: Callable[[ChunkKey], bool]) -> int:
        """Drop queued entries; how many."""
        with self._changed:
            dropped = [key for key in self._jobs if matching(key)]
            for key in dropped:
                self._drop(key)
            self._changed.notify_all()
        return len(dropped)

    def _wait(self, condition: Callable[[], bool], patience_s: float) -> bool:
        with self._changed:
            if self._jobs or self._is_untidy:
                self._start()
            while not condition():
                done = self._done
                if not self._changed.wait_for(lambda done=done: condition() or self._done != done, patience_s):  # type: ignore[misc]
                    return False
            return True

    @property
    def _is_untidy(self) -> bool:
        return self._tidied != self._requests

    def _has_room(self, nbytes: int) -> bool:
        return not self._extra_bytes or self._extra_bytes + nbytes <= self._max_bytes

    def _start(self) -> None:
        """Have a thread running; one that a fork left behind in the parent does not count."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="kvmosaic-writer")
            thread.start()
            self._thread = thread

    def _drop(self, key: ChunkKey) -> None:
        job = self._jobs.pop(key, None)
        self._extra_bytes -= job.extra_bytes if job else 0

    def _run(self) -> None:
        while True:
            with self._changed:
                job, requests = next(iter(self._jobs.values()), None), self._requests
                is_untidy = self._is_untidy
                if job is None and not is_untidy:
                    self._thread = None
                    return
            try:
                if is_untidy:
                    self._tidy()
                if job is not None:
                    with on_side_stream(job.ready):
                        self._write(job.entry, job.level)
            except Exception:  # a dead writer would leave everything queued
                logger.exception("the store's writer failed; what it was about to write stays in the faster tiers")
            with self._changed:
                self._done += 1
                self._tidied = requests
                queued = None if job is None else self._jobs.get(job.entry.key)
                # Else it was queued again for a faster tier meanwhile, or its memory has become extra.
                if job is not None and queued is not None and queued.entry is job.entry and queued.level == job.level:
                    self._drop(job.entry.key)
                self._changed.notify_all()
