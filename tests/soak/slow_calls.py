"""Records what every thread of a process is doing while a call takes long."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

LONG_S = 0.4
"""Seconds after which a call is recorded. A step usually takes less than a tenth of that."""
FRAMES = 6
"""Number of innermost frames that are recorded of each thread, wherever they are."""


class SlowCalls:
    """Watches one function of one thread."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._found: list[str] = []

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose calls are watched from now on."""
        caller = threading.get_ident()

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._since = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self._since = None

        threading.Thread(target=self._watch, args=(caller,), name="soak-watch", daemon=True).start()
        return watched

    def take(self) -> list[str]:
        """The stacks of all threads during each long call since the last time."""
        found, self._found = self._found, []
        return found

    def _watch(self, caller: int) -> None:
        recorded = None
        while True:
            time.sleep(LONG_S / 8)
            since = self._since
            if since is not None and since != recorded and time.monotonic() - since > LONG_S:
                recorded = since
                self._found.append(_stacks(caller))


def _stacks(caller: int) -> str:
    """What all threads but this one do, ``caller`` first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != caller)
    return "\n".join(
        f"{names.get(number, number)}: " + " < ".join(_shown(frame))
        for number, frame in frames
        if number != threading.get_ident()
    )


def _shown(frame: Any) -> list[str]:
    """The innermost frames, and those behind them that are in an engine's own code."""
    stack = traceback.extract_stack(frame)[::-1]
    engine = [each for each in stack[FRAMES:] if "/vllm/" in each.filename or "/kvmosaic/" in each.filename]
    return [f"{each.name} {each.filename.rpartition('/')[2]}:{each.lineno}" for each in stack[:FRAMES] + engine]
