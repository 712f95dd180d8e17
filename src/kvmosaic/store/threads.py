"""Calls in other threads, which can be abandoned when they take too long."""

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MOST_AT_ONCE = 4
"""Maximum number of threads that share one piece of work: more do not read memory faster."""


class Call(Generic[T]):
    """A call that another thread may wait for."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._finished = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, in any thread."""
        try:
            self._result.append(self._function())
        except BaseException as error:  # raised in the thread that waits
            self._error = error

    def finish(self) -> None:
        """Wake the waiting threads."""
        self._finished.set()

    def wait(self, seconds: float | None) -> bool:
        """Wait for at most ``seconds`` (``None``: without limit). Returns whether the call is over."""
        return self._finished.wait(seconds)

    def result(self) -> T:
        """Return or raise the result of the call, which has to be over."""
        if self._error is not None:
            raise self._error
        return self._result[0]


class Threads:
    """As many threads as there are concurrent calls. They are reused: a new thread for each call would get fresh
    memory, page by page, and take twice as long to read a value of 1 MB. They are daemons, so none keeps a program
    from ending. Executors of the standard library refuse calls when it ends, while the last entries are still being
    written."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self, function: Callable[[], T], or_here: bool = False) -> Call[T]:
        """Start a call in an idle or new thread. ``or_here``: if none can be started, make the call in this one."""
        call = Call(function)
        try:
            self._idle_or_new().calls.put(call)
        except RuntimeError:
            # From Python 3.12 on, a program that is ending cannot start threads, but still writes its last entries.
            if not or_here and threading.main_thread().is_alive():
                raise
            call.run()
            call.finish()
        return call

    def map(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """The results of ``functions``, called concurrently by this thread and others. Worth it for work that lets
        other threads run, such as checksums of large values."""
        ways = max(1, min(len(functions), os.cpu_count() or 1, MOST_AT_ONCE))
        calls = [self.start(partial(_call_all, functions[way::ways]), or_here=True) for way in range(1, ways)]
        own = Call(partial(_call_all, functions[::ways]))
        own.run()
        for call in calls:  # even if one fails: they may use the caller's memory
            call.wait(None)
        shares = [call.result() for call in (own, *calls)]
        return [shares[index % ways][index // ways] for index in range(len(functions))]

    def _idle_or_new(self) -> "_Thread":
        with self._lock:
            while self._idle:
                thread = self._idle.pop()
                if thread.is_alive():  # a fork does not copy threads
                    return thread
        thread = _Thread(self._keep)
        thread.start()
        return thread

    def _keep(self, thread: "_Thread") -> bool:
        """Keep a thread for the next call. ``False`` if it has to end."""
        with self._lock:
            if not self._is_closed:
                self._idle.append(thread)
            return not self._is_closed

    def close(self) -> None:
        """End the idle threads now, and busy ones after their call."""
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().calls.put(None)


class _Thread(threading.Thread):
    def __init__(self, keep: "Callable[[_Thread], bool]") -> None:
        super().__init__(name="kvmosaic-store", daemon=True)
        self.calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._keep = keep

    def run(self) -> None:
        is_kept = True
        while is_kept and (call := self.calls.get()) is not None:
            call.run()
            is_kept = self._keep(self)  # before finish(), so that the caller's next call finds it
            call.finish()
            del call  # frees the values that it holds


def _call_all(functions: Sequence[Callable[[], T]]) -> list[T]:
    return [function() for function in functions]
