"""A disk that hangs, recovers, or is full: no put and no look-up waits for it, and lost entries are counted."""

import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.store import ChunkStorageManager, MissReason, open_store
from kvmosaic.store import breaker as breaker_module
from kvmosaic.store import open as open_module
from kvmosaic.store.tiers import guarded
from kvmosaic.store.tiers.disk import DiskTier

ONE = make_entry(0).nbytes
DEADLINE_S = 0.3
LONG_S = 20.0
"""Seconds after which a test concludes that something waits forever."""


class HungDisk(DiskTier):
    """A disk whose calls all wait while it hangs, as in a file system whose server is gone."""

    hanging = threading.Event()
    back = threading.Event()
    waiting: ClassVar[set[int]] = set()

    def _wait(self) -> None:
        waiting, me = type(self).waiting, threading.get_ident()  # of this test, even if the next one has begun
        if self.hanging.is_set():
            waiting.add(me)
            self.back.wait()
            waiting.discard(me)

    def check(self) -> None:
        self._wait()
        super().check()

    def size(self, key: Any) -> Any:
        self._wait()
        return super().size(key)

    def get(self, key: Any) -> Any:
        self._wait()
        return super().get(key)

    def put(self, entry: Any) -> Any:
        self._wait()
        return super().put(entry)

    def delete(self, key: Any) -> Any:
        self._wait()
        super().delete(key)

    def scan(self) -> Any:
        self._wait()
        return super().scan()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Let the disk hang or recover."""

    def set_hanging(is_hanging: bool) -> None:
        if is_hanging:
            HungDisk.back.clear()
            HungDisk.hanging.set()
        else:
            HungDisk.hanging.clear()
            HungDisk.back.set()

    monkeypatch.setattr(open_module, "DiskTier", HungDisk)
    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(breaker_module, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(guarded, "DEADLINE_S", DEADLINE_S)
    HungDisk.waiting = set()
    yield set_hanging
    set_hanging(False)


def opened(path: Path, host: int = 4 * ONE) -> ChunkStorageManager:
    return open_store(load_config(disk_path=path, host_memory=host))


def in_time(function: Callable[[], Any]) -> Any:
    """The result of ``function``, called in a thread that is abandoned if it never returns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert results, "it waits for ever"
    return results[0]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_hung_disk_stops_nobody(tmp_path: Path, hang: Callable[[bool], None]) -> None:
    """This holds for everything that an engine's step calls. Calls after the first deadline return at once."""
    store = opened(tmp_path)
    store.put(make_entry(0))
    store.flush()
    hang(True)
    entries = [make_entry(number) for number in range(1, 40)]

    def step() -> bool:
        for entry in entries:
            with store.pin([entry.key]):
                store.absent([entry.key])
                assert store.put(entry)
                found = store.lookup(entry.key, entry.tokens, entry.context)
                assert found.entry is not None
                assert same(found.entry, entry)
            store.take_changes()
            store.held()
            store.event_counts()
            store.get_stats()
        return True

    assert in_time(step)
    until(lambda: not store._stack.tiers[-1].is_up)
    assert in_time(lambda: store.lookup(make_entry(0).key, make_entry(0).tokens, make_entry(0).context)).reason in (
        MissReason.ERROR,
        None,
    )
    assert in_time(lambda: store.contains(make_entry(99).key)) is False
    assert in_time(lambda: store.clear() or True)
    assert in_time(lambda: store.flush() or True)
    assert in_time(lambda: store.close() or True)
    assert len(HungDisk.waiting) <= 3, "threads that are left behind are few"


def test_the_disk_comes_back(tmp_path: Path, hang: Callable[[bool], None], caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path, host=100 * ONE)
    kept = [make_entry(number) for number in range(5)]
    assert all(store.put(entry) for entry in kept)
    assert store.lasting([entry.key for entry in kept]) == {entry.key for entry in kept}
    for _ in range(2):
        hang(True)
        assert in_time(lambda: store.put(make_entry(10 + len(caplog.records))))
        until(lambda: not store._stack.tiers[-1].is_up)
        # Nothing is tried while hanging calls may still have an effect.
        waiting = set(HungDisk.waiting)
        time.sleep(0.5)
        assert HungDisk.waiting == waiting
        hang(False)
        until(lambda: store._stack.tiers[-1].is_up)
    assert store.lasting([entry.key for entry in kept]) == {entry.key for entry in kept}
    late = make_entry(50)
    assert store.put(late)
    assert store.lasting([late.key]) == {late.key}
    assert store.get_stats()["write_errors"] >= 2
    store.close()
    again = opened(tmp_path)
    for entry in (*kept, late):
        found = again.lookup(entry.key, entry.tokens, entry.context)
        assert found.entry is not None
        assert same(found.entry, entry)
    again.close()


def test_what_the_queue_has_no_room_for_is_counted(tmp_path: Path, hang: Callable[[bool], None]) -> None:
    store = opened(tmp_path, host=2 * ONE)
    store._stack.writer._max_bytes = 3 * ONE
    hang(True)
    count = 200
    assert all(in_time(lambda: [store.put(make_entry(number)) for number in range(count)]))
    hang(False)
    until(lambda: store._stack.tiers[-1].is_up)
    store.flush()
    stats = store.get_stats()
    there = sum(store.contains(make_entry(number).key) for number in range(count))
    assert stats["dropped_writes"] > 0
    assert there + stats["dropped_writes"] + stats["write_errors"] >= count
    store.close()


@pytest.mark.parametrize("host", [ONE // 2, 2 * ONE], ids=["too little memory", "evictions"])
def test_nobody_waits_for_room_in_the_queue(
    tmp_path: Path, hang: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, host: int
) -> None:
    """Not even until the disk's deadline is over, which is 30 seconds of an engine's step."""
    monkeypatch.setattr(guarded, "DEADLINE_S", 1000.0)
    store = opened(tmp_path, host)
    store._stack.writer._max_bytes = 3 * ONE
    hang(True)
    assert in_time(lambda: [store.put(make_entry(number)) for number in range(50)])
    assert store._stack.tiers[-1].is_up
    assert store.get_stats()["dropped_writes"] > 0
    hang(False)
    store.close()


def test_a_start_with_a_hung_disk(
    tmp_path: Path, hang: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts without the entries on disk, and learns of them when the disk is back."""
    entry = make_entry(1)
    DiskTier(tmp_path, 2**30).put(entry)
    hang(True)
    store = in_time(lambda: opened(tmp_path))
    assert len(caplog.records) == 1, caplog.text
    assert "cannot be used" in caplog.text
    assert not list(store.scan())
    assert in_time(lambda: store.lookup(entry.key, entry.tokens, entry.context)).reason is MissReason.ERROR
    assert in_time(lambda: store.put(make_entry(2)))
    hang(False)
    until(lambda: {info.key: info.tier for info in store.scan()}.get(entry.key) == "disk")
    assert store.held()["disk"][0] >= 1
    assert store.lookup(entry.key, entry.tokens, entry.context).tier == "disk"
    assert in_time(lambda: store.close() or True)


def test_what_is_cleared_while_the_disk_hangs_is_deleted_when_it_is_back(
    tmp_path: Path, hang: Callable[[bool], None]
) -> None:
    store = opened(tmp_path)
    entries = [make_entry(number) for number in range(6)]
    for entry in entries:
        store.put(entry)
    store.flush()
    hang(True)
    start = time.monotonic()
    for _ in range(5):
        store.clear()
    assert time.monotonic() - start < DEADLINE_S / 2, "a step waits for it"
    until(lambda: not store._stack.tiers[-1].is_up)
    for entry in entries:
        assert in_time(lambda entry=entry: store.lookup(entry.key, entry.tokens, entry.context)).entry is None
    assert not list(store.scan())
    hang(False)
    until(lambda: not list(tmp_path.rglob("*.safetensors")))
    assert store.put(entries[0])
    assert store.lasting([entry.key for entry in entries]) == {entries[0].key}
    store.close()


def test_a_store_that_ends_before_the_disk_is_back_says_what_it_could_not_clear(
    tmp_path: Path, hang: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    store.put(make_entry(1))
    store.flush()
    hang(True)
    store.clear()
    assert in_time(lambda: store.close() or True)
    assert "may still have entries that were cleared" in caplog.records[-1].message


def test_a_hung_call_blocks_no_other_key(tmp_path: Path, hang: Callable[[bool], None]) -> None:
    """One thread asks for a key just when the disk hangs. Meanwhile others use entries in memory."""
    store = opened(tmp_path)
    store.put(make_entry(0))
    store.flush()
    hang(True)
    stuck = threading.Thread(target=lambda: store.contains(make_entry(77).key), daemon=True)
    stuck.start()
    until(lambda: bool(HungDisk.waiting))
    found = in_time(lambda: store.lookup(make_entry(0).key, make_entry(0).tokens, make_entry(0).context))
    assert found.tier == "host"
    stuck.join(LONG_S)
    assert not stuck.is_alive()
    hang(False)
    store.close()


def test_a_full_disk_is_still_read(tmp_path: Path) -> None:
    """The disk is really full for this process: no file may grow beyond the size of the first one."""
    store = opened(tmp_path)
    store.put(make_entry(0))
    store.close()
    store = opened(tmp_path)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        assert store.put(make_entry(1))
        store.flush()
        found = store.lookup(make_entry(0).key, make_entry(0).tokens, make_entry(0).context)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert found.tier == "disk"
    assert store.get_stats()["write_errors"] == 1
    assert store.put(make_entry(2))
    assert store.lasting([make_entry(2).key])
    store.close()
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if stat.S_ISREG(os.lstat(path).st_mode)]
    assert min(sizes) > ONE, "what was half written is gone"
