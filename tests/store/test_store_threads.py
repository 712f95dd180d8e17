"""Work that threads share, with failures of threads."""

import threading
import time

import pytest

from kvmosaic.store.threads import Threads


def test_results_come_in_order() -> None:
    threads = Threads()
    assert threads.map([lambda number=number: number for number in range(10)]) == list(range(10))
    assert threads.map([]) == []
    threads.close()


@pytest.mark.parametrize("failing", range(4))
def test_nobody_goes_on_while_others_still_work(failing: int) -> None:
    """The other threads may be writing to the caller's memory."""
    threads, done = Threads(), []

    def work(number: int) -> None:
        if number == failing:
            raise ZeroDivisionError
        time.sleep(0.05)
        done.append(number)

    with pytest.raises(ZeroDivisionError):
        threads.map([lambda number=number: work(number) for number in range(4)])
    finished = list(done)
    time.sleep(0.2)
    assert done == finished
    threads.close()


def test_without_new_threads_work_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens at the end of a program, from Python 3.12 on."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads = Threads()
    assert threads.map([lambda: 1, lambda: 2]) == [1, 2]
    with pytest.raises(RuntimeError):  # a call with a deadline needs a thread
        threads.start(lambda: 7)
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    call = threads.start(lambda: 7)
    assert call.wait(0)
    assert call.result() == 7
