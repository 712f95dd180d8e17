"""Calls in other threads, which can be left behind when they take too long."""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MOST_AT_ONCE = 4
"""Threads that share one piece of work: memory is not read faster by more."""


class Call(Generic[T]):
    """A call on its way."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._finished = threading.Event()
        self._result: list[T] = []
        self._error: Exception | None = None

    def run(self) -> None:
        """Make the call, in any thread."""
        try:
            self._result.append(self._function())
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Tell whoever waits."""
        self._finished.set()

    def wait(self, seconds: float | None) -> bool:
        """Whether it is over, after ``seconds`` at most; ``None``: after however long it takes."""
        return self._finished.wait(seconds)

    def result(self) -> T:
        """What the call returned or raised, once it is over."""
        if self._error is not None:
            raise self._error
        return self._result[0]


class Threads:
    """As many threads as there are calls at once. They are kept: a new one for each call would have memory of its
    own, page by page, and take twice as long to read a value of 1 MB. They are daemons, so none keeps a program from
    ending; executors of the standard library refuse calls when it ends, while the last entries are still written."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._lock = threading.Lock()

    def start(self, function: Callable[[], T], or_here: bool = False) -> Call[T]:
        """Start a call in an idle thread, or in a new one. ``or_here``: if there can be none, make it right away."""
        call = Call(function)
        try:
            self._idle_or_new().calls.put(call)
        except RuntimeError:
            # From Python 3.12 on a program that is ending has no new threads, and still writes its last entries.
            if not or_here and threading.main_thread().is_alive():
                raise
            call.run()
            call.finish()
        return call

    def map(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """What all ``functions`` return, called by this thread and others at the same time: worth it for work that
        lets other threads run, such as checksums of large values."""
        ways = max(1, min(len(functions), os.cpu_count() or 1, MOST_AT_ONCE))
        calls = [self.start(partial(_call_all, functions[way::ways]), or_here=True) for way in range(1, ways)]
        own = Call(partial(_call_all, functions[::ways]))
        own.run()
        for call in calls:  # all of them, also if one fails: they may use what belongs to the caller
            call.wait(None)
        shares = [call.result() for call in (own, *calls)]
        return [shares[index % ways][index // ways] for index in range(len(functions))]

    def _idle_or_new(self) -> "_Thread":
        with self._lock:
            while self._idle:
                thread = self._idle.pop()
                if thread.is_alive():  # a fork leaves them behind in the parent
                    return thread
        thread = _Thread(self._idle)
        thread.start()
        return thread

    def close(self) -> None:
        """End the idle ones."""
        with self._lock:
            while self._idle:
                self._idle.pop().calls.put(None)


class _Thread(threading.Thread):
    def __init__(self, idle: "list[_Thread]") -> None:
        super().__init__(name="kvmosaic-store", daemon=True)
        self.calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._idle = idle

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            call.run()
            self._idle.append(self)  # before others hear of it, so that their next call finds it
            call.finish()
            del call  # with the values that it holds


def _call_all(functions: Sequence[Callable[[], T]]) -> list[T]:
    return [function() for function in functions]
