"""Clearing: at once in memory, later in slow tiers, and permanently."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remote_servers import Valkey
from store_helpers import make_entry
from test_store_manager import ONE, PLENTY, SlowTier, find, two_tiers

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import ChunkStorageManager, EntryInfo, HostTier, MissReason
from kvmosaic.store import breaker as breaker_module
from kvmosaic.store import clearing as clearing_module
from kvmosaic.store.tiers.remote import open_remote_tier

LONG_S = 20.0


class GatedTier(SlowTier):
    """A slow tier whose changing and listing calls wait for a gate."""

    def __init__(self, name: str = "disk", capacity: int | None = None) -> None:
        super().__init__()
        self.name, self.capacity = name, capacity
        self.calls = 0
        self.gate.set()

    def _wait(self) -> None:
        self.calls += 1
        assert self.gate.wait(LONG_S)
        if self.error:
            raise self.error

    def get(self, key: ChunkKey) -> ChunkKV | None:
        entry = super().get(key)
        self._wait()
        return entry

    def put(self, entry: ChunkKV) -> int:
        self._wait()
        return super().put(entry)

    def delete(self, key: ChunkKey) -> None:
        self._wait()
        super().delete(key)

    def scan(self) -> Iterator[EntryInfo]:
        self._wait()
        yield from super().scan()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_clear_waits_for_no_slow_tier() -> None:
    slow = GatedTier()
    store = ChunkStorageManager([HostTier(PLENTY), slow])
    for number in range(3):
        store.put(make_entry(number))
    store.flush()
    slow.gate.clear()
    done = threading.Event()
    threading.Thread(target=lambda: (store.clear(), done.set()), daemon=True).start()
    assert done.wait(5), "it lists or deletes itself"
    assert [find(store, make_entry(number)).reason for number in range(3)] == [MissReason.NEW] * 3
    assert not list(store.scan())
    assert not store.contains(make_entry(1).key)
    assert len(slow.entries) == 3
    slow.gate.set()
    store.flush()
    assert not slow.entries
    store.close()


@pytest.mark.parametrize("puts_again", [False, True])
def test_a_write_that_a_clear_overtakes_is_void(puts_again: bool) -> None:
    """Entries that are put after the clear are written, even if they are the same objects."""
    slow = GatedTier()
    store = ChunkStorageManager([HostTier(0), slow])
    slow.gate.clear()
    before, entry = slow.calls, make_entry(1)
    store.put(entry)
    store.put(make_entry(2))
    until(lambda: slow.calls > before)  # the first is being written, the second is queued
    store.clear()
    if puts_again:
        store.put(entry)
    slow.gate.set()
    store.flush()
    left = [entry.key] if puts_again else []
    assert list(slow.entries) == left
    assert [info.key for info in store.scan()] == left
    assert find(store, make_entry(2)).reason is MissReason.NEW
    store.close()


def test_an_entry_that_was_being_handed_down_does_not_come_back() -> None:
    """The entry was evicted from one slow tier, and is being read for the next one when it is cleared."""
    near, far = GatedTier("disk", capacity=ONE), GatedTier("remote")
    store = ChunkStorageManager([HostTier(0), near, far])
    far.error = OSError("not yet")
    store.put(make_entry(1))
    store.flush()
    far.error = None
    near.gate.clear()
    before = near.calls
    store.put(make_entry(2))  # takes the first one's room
    until(lambda: near.calls > before)
    store.clear()
    near.gate.set()
    store.flush()
    assert not near.entries
    assert not far.entries
    store.close()


def test_only_what_matches_is_void() -> None:
    slow = GatedTier()
    store = ChunkStorageManager([HostTier(PLENTY), slow])
    slow.gate.clear()
    before, kept = slow.calls, make_entry(1, tenant="kept")
    store.put(kept)
    until(lambda: slow.calls > before)
    store.clear(lambda key: key.tenant != "kept")
    slow.gate.set()
    store.flush()
    assert list(slow.entries) == [kept.key]
    assert store._stack.index.holds(kept.key, "disk"), "it would not count"
    store.close()


def test_a_tier_that_fails_to_delete_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it does not serve cleared entries, and is given none."""
    monkeypatch.setattr(clearing_module, "ERROR_SECONDS", 0.3)
    slow = GatedTier()
    store = ChunkStorageManager([HostTier(ONE), slow])
    store.put(make_entry(1))
    store.flush()
    slow.error = OSError("broken")
    store.clear()
    store.flush()
    assert list(slow.entries) == [make_entry(1).key]
    slow.error = None
    assert find(store, make_entry(1)).reason is MissReason.NEW
    until(lambda: not slow.entries)
    assert store.put(make_entry(1))
    store.flush()
    assert list(slow.entries) == [make_entry(1).key]
    store.close()


def test_equal_clears_are_due_once() -> None:
    """An engine may have to clear in every step while its disk is broken."""

    class Tenant:
        def owns(self, key: ChunkKey) -> bool:
            return key.tenant == "default"

    slow, tenant = GatedTier(), Tenant()
    store = ChunkStorageManager([HostTier(PLENTY), slow])
    slow.error = OSError("broken")
    for _ in range(100):
        store.clear(tenant.owns)
    assert len(store._stack.known.due.at(1)) == 1
    store.flush()
    slow.error = None
    store.close()


def test_one_file_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = two_tiers(tmp_path)
    for number in range(5):
        store.put(make_entry(number))
    store.flush()
    disk, stuck = store._stack.tiers[1], make_entry(0).key
    really = disk.delete

    def delete(key: ChunkKey) -> None:
        if key == stuck:
            raise PermissionError("not yours")
        really(key)

    monkeypatch.setattr(disk, "delete", delete)
    store.clear()
    store.flush()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    assert find(store, make_entry(0)).entry is None
    store.close()


def test_what_is_cleared_while_a_remote_store_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker_module, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(breaker_module, "LONGEST_PAUSE_S", 0.1)
    server = Valkey(tmp_path, persistent=True)
    store = ChunkStorageManager([HostTier(0), open_remote_tier(server.url, 2.0)])
    for number in range(4):
        store.put(make_entry(number))
    store.flush()
    server.kill()
    assert find(store, make_entry(0)).reason is MissReason.ERROR
    store.clear()
    store.flush()
    assert not store.put(make_entry(9)), "nobody takes it"
    server.start()
    until(lambda: store._stack.tiers[1].is_up)
    tier = open_remote_tier(server.url, 2.0)
    until(lambda: not list(tier.scan()))
    assert store.put(make_entry(9))
    store.flush()
    assert [info.key for info in tier.scan()] == [make_entry(9).key]
    for each in (store, tier):
        each.close()
    server.kill()


@pytest.mark.parametrize("is_fetched", [False, True])
@pytest.mark.parametrize("is_far", [False, True])
def test_an_entry_that_is_being_read_when_it_is_cleared_does_not_come_back(is_far: bool, is_fetched: bool) -> None:
    """A far tier is not asked again whether it still has what it sent."""
    slow, entry = GatedTier(), make_entry(1)
    slow.is_far = is_far
    slow.entries[entry.key] = entry
    store = ChunkStorageManager([HostTier(PLENTY), slow])
    slow.gate.clear()
    before = slow.calls
    read = threading.Thread(target=lambda: store.fetch([entry.key]) if is_fetched else find(store, entry))
    read.start()
    until(lambda: slow.calls > before)
    store.clear()
    slow.gate.set()
    read.join(LONG_S)
    assert find(store, entry).entry is None
    store.flush()
    assert not slow.entries
    assert not list(store.scan())
    store.close()
