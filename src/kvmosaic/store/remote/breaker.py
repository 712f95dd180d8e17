"""A deadline around every call of a remote store, and no calls at all while it is down."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvmosaic.store.base import TierDownError
from kvmosaic.store.remote.base import RefusedError
from kvmosaic.store.threads import Threads

logger = logging.getLogger(__name__)

T = TypeVar("T")

SLOWEST_BYTES_PER_SECOND = 50e6
"""A transfer may take as long as at this rate, on top of the deadline."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Breaker:
    """Runs calls in other threads and waits for each no longer than its deadline: name resolution and foreign
    libraries cannot be told one. After the first call that fails no other is let through, until a probe in the
    background succeeds. So a store that dies costs its users one deadline, once."""

    def __init__(self, name: str, deadline_s: float, probe: Callable[[], object]) -> None:
        """``probe`` is any call of the store; it may take its time."""
        self._name = name
        self._deadline_s = deadline_s
        self._probe = probe
        self._threads = Threads()
        self._lock = threading.Lock()
        self._down: str | None = None
        """Why calls are not let through."""
        self._closed = threading.Event()
        self._pause_s = FIRST_PAUSE_S
        self._up_since = 0.0

    def call(self, function: Callable[[], T], nbytes: Callable[[], int] = lambda: 0) -> T:
        """``function()``, which moves ``nbytes()`` bytes, a number known when the deadline is over at the latest.
        Raises :class:`TierDownError` when the store is down, or now found to be: what comes later is dropped."""
        if self._down is not None:
            raise TierDownError(f"{self._name} cannot be used ({self._down})")
        call = self._threads.start(function)
        try:
            if not call.wait(self._deadline_s):
                more = nbytes() / SLOWEST_BYTES_PER_SECOND
                if not call.wait(more):
                    raise TimeoutError(f"no answer in {self._deadline_s + more:.1f} s")
            return call.result()
        except RefusedError:
            raise
        except Exception as error:  # a foreign library may raise anything
            self._open(str(error) or repr(error))
            raise TierDownError(f"{self._name} cannot be used ({error})") from error

    def close(self) -> None:
        """End the probing and the threads."""
        self._closed.set()
        self._threads.close()

    def _open(self, reason: str) -> None:
        with self._lock:
            if self._down is not None:
                return
            self._down = reason
            # A store that keeps failing right after its probes, say with one of several machines dead, is tried less
            # and less often.
            relapsed = time.monotonic() - self._up_since < 2 * LONGEST_PAUSE_S
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if relapsed and self._up_since else FIRST_PAUSE_S
        logger.warning("%s cannot be used (%s); going on without it until it can", self._name, reason)
        # Else the program is ending, and nobody waits for the store to be back.
        if threading.main_thread().is_alive():
            threading.Thread(target=self._wait_until_up, name="kvmosaic-probe", daemon=True).start()

    def _wait_until_up(self) -> None:
        while not self._closed.wait(self._pause_s):
            try:
                self._probe()
            except Exception:
                continue
            self._up_since = time.monotonic()
            self._down = None
            logger.warning("%s can be used again", self._name)
            return
