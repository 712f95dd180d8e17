"""A deadline for every call to a place that may hang, and no calls while the place is down."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvmosaic.store.base import TierDownError
from kvmosaic.store.threads import Call, Threads

logger = logging.getLogger(__name__)

T = TypeVar("T")
Count = Callable[[], int]

SLOWEST_BYTES_PER_SECOND = 50e6
"""Minimum rate of a transfer. A call may take its bytes divided by this rate, on top of the deadline."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """Runs calls in other threads and waits for each no longer than its deadline, because name resolution, foreign
    libraries and file systems accept none. After the first call that fails, no other is let through until a probe in
    the background succeeds. So a place that dies costs its users one deadline, once.

    An abandoned call may still have an effect, so no other is let through before it has ended. Therefore there are
    never more abandoned threads than there were concurrent calls."""

    def __init__(
        self, name: str, deadline_s: float, probe: Callable[[], object], harmless: tuple[type[Exception], ...]
    ) -> None:
        """``probe`` is any call to the place; it has no deadline. ``harmless`` errors say nothing about the place as
        a whole and are raised unchanged."""
        self._name = name
        self._deadline_s = deadline_s
        self._probe = probe
        self._harmless = harmless
        self._threads = Threads()
        self._lock = threading.Lock()
        self._down: str | None = None
        """Reason why calls are not let through; ``None`` while they are."""
        self._left_behind: list[Call[Any]] = []
        self.when_up: Callable[[], None] = lambda: None
        """Called in a thread of its own whenever calls are let through again."""
        self._closed = threading.Event()
        self._pause_s = FIRST_PAUSE_S
        self._up_since = 0.0

    @property
    def is_up(self) -> bool:
        """Whether calls are let through."""
        return self._down is None

    def call(self, function: Callable[[], T], nbytes: Count = lambda: 0, progress: Count = lambda: 0) -> T:
        """Call ``function``, which moves ``nbytes()`` bytes; that number is known at the latest when the deadline is
        over. The call may take longer as long as ``progress()`` grows. Raises :class:`TierDownError` when the place
        is down or this call finds it down. A result that comes later is dropped."""
        if self._down is not None:
            raise TierDownError(f"{self._name} cannot be used ({self._down})")
        call = self._threads.start(function)
        seen, waited = progress(), self._deadline_s
        while not call.wait(self._deadline_s):
            if (now := progress()) != seen:
                seen = now
                continue
            more = nbytes() / SLOWEST_BYTES_PER_SECOND
            if call.wait(more):
                break
            waited += more
            with self._lock:
                self._left_behind.append(call)
            self._open(f"no answer in {waited:.1f} s")
            raise TierDownError(f"{self._name} cannot be used (no answer in {waited:.1f} s)")
        try:
            return call.result()
        except self._harmless:
            raise
        except Exception as error:  # a foreign library may raise anything
            reason = str(error) or repr(error)
            self._open(reason)
            raise TierDownError(f"{self._name} cannot be used ({reason})") from error

    def close(self) -> None:
        """Stop probing and end the threads."""
        self._closed.set()
        self._threads.close()

    def _open(self, reason: str) -> None:
        with self._lock:
            if self._down is not None:
                return
            self._down = reason
            # A place that keeps failing right after its probes, for example with one of several machines dead, is
            # tried less and less often.
            relapsed = time.monotonic() - self._up_since < 2 * LONGEST_PAUSE_S
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if relapsed and self._up_since else FIRST_PAUSE_S
        logger.warning("%s cannot be used (%s); continuing without it until it works again", self._name, reason)
        # Otherwise the program is ending and does not need the place again.
        if threading.main_thread().is_alive():
            threading.Thread(target=self._wait_until_up, name="kvmosaic-probe", daemon=True).start()

    def _wait_until_up(self) -> None:
        while not self._closed.wait(self._pause_s):
            with self._lock:
                self._left_behind = [call for call in self._left_behind if not call.wait(0)]
                if self._left_behind:
                    continue
            try:
                self._probe()
            except Exception:
                continue
            self._up_since = time.monotonic()
            self._down = None
            logger.warning("%s can be used again", self._name)
            self.when_up()
            return
