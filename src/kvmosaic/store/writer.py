"""The one thread that writes entries to the slower tiers."""

import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.streams import on_side_stream, record_event
from kvmosaic.store.tiers.host import taken_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 * 1024**2
"""Maximum memory of queued entries that no tier counts, in bytes."""
PATIENCE_S = 60.0
"""Seconds without progress after which callers stop waiting for the queue."""


class _Job(NamedTuple):
    number: int
    """Unique: a key may be queued again while its entry is being written."""
    entry: ChunkKV
    level: int
    is_believed: bool
    ready: "torch.cuda.Event | None"
    """Event after which the entry's data is there."""
    extra_bytes: int
    """Bytes of its memory; 0 if the fastest tier uses the same memory and counts it."""


class BackgroundWriter:
    """A queue of entries on their way to slower tiers. Queued entries can be looked up. Adding never waits for room:
    entries that do not fit are refused.

    The thread starts with the first entry and ends when the queue is empty. It is not a daemon, so a program that
    forgets to close the store still writes everything before it exits, and does not hang.
    """

    def __init__(
        self,
        write: Callable[[ChunkKV, int, bool], None],
        tidy: Callable[[], None],
        progress: Callable[[], int] = lambda: 0,
        max_bytes: int = QUEUE_BYTES,
    ) -> None:
        """``write`` stores an entry in all tiers from a level on; its last argument is whether the tier at that level
        is believed to have it. ``tidy`` does all other pending work in slow tiers. ``progress()`` grows while either
        makes progress."""
        self._write = write
        self._tidy = tidy
        self._progress = progress
        self._numbers = itertools.count()
        self._max_bytes = max_bytes
        self._jobs: dict[ChunkKey, _Job] = {}
        self._extra_bytes = 0
        self._requests = self._tidied = 0
        """Number of requests for tidying that were made, and of those that were met."""
        self._done = 0
        """Counter that grows with every tidying and every write."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The queued entry of ``key``."""
        job = self._jobs.get(key)
        return None if job is None else job.entry

    def add(self, entry: ChunkKV, level: int, is_extra: bool = True, is_believed: bool = False) -> bool:
        """Queue ``entry`` for all tiers from ``level`` on. Returns whether it is queued. ``is_extra``: its memory is
        not that of an entry in the fastest tier. ``is_believed``: the tier at ``level`` is believed to have it, and
        the write only makes sure. Never waits, so it may be called under a lock."""
        with self._changed:
            queued = self._jobs.get(entry.key)
            if queued is not None and queued.level <= level:
                return True
            extra = taken_bytes(entry.data) if is_extra else 0
            if not self._has_room(extra):
                return queued is not None
            self._drop(entry.key)
            self._jobs[entry.key] = _Job(next(self._numbers), entry, level, is_believed, record_event(), extra)
            self._extra_bytes += extra
            self._start()
            return True

    def outlives(self, key: ChunkKey) -> bool:
        """Note that the fastest tier drops a queued entry, whose memory is extra from now on. Returns whether there
        is room; if not, the entry is dropped from the queue."""
        with self._changed:
            job = self._jobs.get(key)
            if job is None or job.extra_bytes:
                return True
            self._drop(key)
            extra = taken_bytes(job.entry.data)
            if not self._has_room(extra):
                self._changed.notify_all()
                return False
            self._jobs[key] = job._replace(extra_bytes=extra)
            self._extra_bytes += extra
            return True

    def request_tidying(self) -> None:
        """Request a call of ``tidy``."""
        with self._changed:
            self._requests += 1
            self._start()

    def wait_for_room(self) -> None:
        """Wait until at most half of the queue's memory is in use. For bulk fills, which need not hurry."""
        self._wait(lambda: 2 * self._extra_bytes <= self._max_bytes)

    def flush(self) -> int:
        """Wait until everything is written or has failed, as long as there is progress. Returns the number of entries
        that are left."""
        return 0 if self._wait(lambda: not self._jobs and not self._is_untidy) else len(self._jobs)

    def discard(self, matching: Callable[[ChunkKey], bool]) -> int:
        """Drop ``matching`` entries from the queue. Returns their number."""
        with self._changed:
            dropped = [key for key in self._jobs if matching(key)]
            for key in dropped:
                self._drop(key)
            self._changed.notify_all()
        return len(dropped)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            if self._jobs or self._is_untidy:
                self._start()
            while not condition():
                done, progress = self._done, self._progress()
                has_got_on = self._changed.wait_for(lambda done=done: condition() or self._done != done, PATIENCE_S)  # type: ignore[misc]
                if not has_got_on and self._progress() == progress:
                    return False
            return True

    @property
    def _is_untidy(self) -> bool:
        return self._tidied != self._requests

    def _has_room(self, nbytes: int) -> bool:
        return not self._extra_bytes or self._extra_bytes + nbytes <= self._max_bytes

    def _start(self) -> None:
        """Start the thread if it is not running. After a fork, the parent's thread does not count."""
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
                requests, is_untidy = self._requests, self._is_untidy
                if not self._jobs and not is_untidy:
                    self._thread = None
                    return
            if is_untidy:
                self._attempt(self._tidy)
            with self._changed:
                self._done += 1
                self._tidied = requests
                self._changed.notify_all()
                job = next(iter(self._jobs.values()), None)  # only now: cleared entries are deleted before it
            if job is None:
                continue
            self._attempt(partial(self._carry_out, job))
            with self._changed:
                self._done += 1
                queued = self._jobs.get(job.entry.key)
                if queued is not None and queued.number == job.number:
                    self._drop(job.entry.key)
                self._changed.notify_all()

    def _carry_out(self, job: _Job) -> None:
        with on_side_stream(job.ready):
            self._write(job.entry, job.level, job.is_believed)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # a dead writer would leave everything queued
            logger.exception("the store's writer failed; the entry it was writing stays in the faster tiers")
