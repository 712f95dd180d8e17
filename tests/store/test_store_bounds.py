"""The store's bookkeeping, and the memory of entries that wait to be written, are bounded."""

import threading
import time

import pytest
import torch
from store_helpers import make_entry
from test_store_manager import PLENTY, SlowTier, find

from kvmosaic.core.entry import ChunkKV
from kvmosaic.store import ChunkStorageManager, HostTier, MissReason
from kvmosaic.store import unreadable as unreadable_module
from kvmosaic.store.tiers.host import taken_bytes
from kvmosaic.store.unreadable import Unreadable
from kvmosaic.store.writer import BackgroundWriter


def test_copies_that_could_not_be_read_are_forgotten_from_the_oldest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreadable_module, "REMEMBERED", 10)
    slow = SlowTier()
    store = ChunkStorageManager([HostTier(PLENTY), slow])
    slow.error = OSError("broken")
    for number in range(30):
        assert find(store, make_entry(number)).reason is MissReason.ERROR
    unreadable = store._stack.known.unreadable
    assert len(unreadable) == 10
    reasons = [unreadable.reason(1, make_entry(number).key) for number in (0, 19, 20, 29)]
    assert reasons == [None, None, MissReason.ERROR, MissReason.ERROR]


def test_a_copy_that_is_met_again_is_not_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreadable_module, "REMEMBERED", 2)
    unreadable, keys = Unreadable(), [make_entry(number).key for number in range(3)]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        unreadable.note(1, key, MissReason.CORRUPT)
    assert [unreadable.reason(1, key) is not None for key in keys] == [True, False, True]


def test_a_damaged_copy_is_never_tried_again_and_one_that_failed_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    unreadable, damaged, failed = Unreadable(), make_entry(1).key, make_entry(2).key
    unreadable.note(1, damaged, MissReason.CORRUPT)
    unreadable.note(1, failed, MissReason.ERROR)
    now += unreadable_module.ERROR_SECONDS
    assert unreadable.reason(1, failed) is MissReason.ERROR
    now += 0.1
    assert unreadable.reason(1, failed) is None
    now += 10**6
    assert unreadable.reason(1, damaged) is MissReason.CORRUPT


def test_what_is_believed_is_forgotten_with_its_job() -> None:
    """A job that is dropped before its turn leaves nothing behind for the next job of its key."""
    gate, written = threading.Event(), list[tuple[int, bool]]()

    def write(entry: ChunkKV, level: int, is_believed: bool) -> None:
        assert gate.wait(20)
        written.append((entry.tokens[0] // 1000, is_believed))

    writer = BackgroundWriter(write, lambda: None)
    writer.add(make_entry(1), 1)
    writer.add(make_entry(2), 1, is_believed=True)
    writer.discard(lambda key: key == make_entry(2).key)
    writer.add(make_entry(2), 1)
    writer.add(make_entry(3), 1, is_believed=True)
    gate.set()
    assert writer.flush() == 0
    assert written == [(1, False), (2, False), (3, True)]


def test_the_queue_counts_pinned_memory_as_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allocates powers of two. This holds for memory that is queued from the start, and for memory that the
    fastest tier drops."""
    entries = [make_entry(number, tokens=33) for number in range(8)]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    most, gate = 4 * taken_bytes(entries[0].data), threading.Event()
    assert most > 4 * entries[0].nbytes

    def write(*job: object) -> None:
        assert gate.wait(20)

    writer = BackgroundWriter(write, lambda: None, max_bytes=most)
    assert [writer.add(entry, 1) for entry in entries] == [True] * 4 + [False] * 4
    writer.discard(lambda key: True)
    assert all(writer.add(entry, 1, is_extra=False) for entry in entries)
    assert [writer.outlives(entry.key) for entry in entries] == [True] * 4 + [False] * 4
    gate.set()
    assert writer.flush() == 0
