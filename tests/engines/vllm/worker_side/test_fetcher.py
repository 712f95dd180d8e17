"""Fetches beside the engine's steps: none delays another, and entries that are no longer needed are released."""

import threading
import time

import pytest

from kvmosaic.engines.vllm.worker_side import fetcher as fetcher_module
from kvmosaic.engines.vllm.worker_side.fetcher import FETCHES_AT_ONCE, MAX_WAITING_FETCHES, TURN_TOKENS, ChunkFetcher
from kvmosaic.store import ChunkStorageManager, MissReason
from kvmosaic.store.tiers.disk import DiskTier
from kvmosaic.store.tiers.host import HostTier
from tests.store.store_helpers import CONTEXT, make_entry

PATIENCE_S = 60.0


class GatedDisk(DiskTier):
    """A disk whose reads of an entry wait for a gate."""

    def __init__(self, *args):
        super().__init__(*args)
        self.opened = {}
        self.asked = []

    def get(self, key):
        self.asked.append(key)
        if key in self.opened:
            assert self.opened[key].wait(PATIENCE_S)
        return super().get(key)


@pytest.fixture
def entries():
    return [make_entry(number) for number in range(40)]


@pytest.fixture
def disk(tmp_path, entries):
    tier = GatedDisk(tmp_path, 2**30)
    for entry in entries:
        tier.put(entry)
    yield tier
    for gate in tier.opened.values():
        gate.set()


@pytest.fixture
def store(disk):
    opened = ChunkStorageManager([HostTier(2**30), disk])
    yield opened
    opened.close()


@pytest.fixture
def fetcher(store, disk):
    started = ChunkFetcher(store)
    yield started
    for gate in disk.opened.values():
        gate.set()
    started.close()


def shut(disk, entry):
    """Make reads of an entry wait for the returned event."""
    gate = disk.opened[entry.key] = threading.Event()
    return gate


def ends(fetcher, *names):
    """Wait until these requests' fetches are over. Returns how each ended."""
    deadline, found = time.monotonic() + PATIENCE_S, {}
    while left := set(names) - found.keys():
        assert time.monotonic() < deadline, f"still waiting for {left}"
        found |= fetcher.take_finished()
        time.sleep(0.001)
    return found


def finished(fetcher, *names):
    """Wait until these requests' fetches are over."""
    ends(fetcher, *names)


def asked(disk, entry):
    deadline = time.monotonic() + PATIENCE_S
    while entry.key not in disk.asked:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_slow_fetch_does_not_hold_up_others(fetcher, disk, entries, store):
    gate = shut(disk, entries[0])
    fetcher.start("slow", [entries[0].key])
    asked(disk, entries[0])
    fetcher.start("quick", [entries[1].key])
    finished(fetcher, "quick")
    assert store.lookup(entries[1].key, entries[1].tokens, CONTEXT, held={}).tier == "disk"
    gate.set()
    finished(fetcher, "slow")


def test_many_slow_fetches_delay_a_quick_one_by_a_turn_each(fetcher, disk, entries, monkeypatch):
    """Some requests of one client name six documents each, on a slow disk. Then somebody else names one."""
    monkeypatch.setattr(fetcher_module, "TURN_TOKENS", 1)
    slow = [entries[6 * number : 6 * number + 6] for number in range(FETCHES_AT_ONCE + 2)]
    gates = {entry.key: shut(disk, entry) for each in slow for entry in each}
    for number, each in enumerate(slow):
        fetcher.start(f"slow {number}", [entry.key for entry in each])
    for each in slow[:FETCHES_AT_ONCE]:
        asked(disk, each[0])
    quick = entries[-1]
    fetcher.start("quick", [quick.key])
    for each in slow:  # the first of each
        asked(disk, each[0])
        gates[each[0].key].set()
    ends(fetcher, "quick")
    assert disk.asked.index(quick.key) <= len(slow) + FETCHES_AT_ONCE
    for gate in gates.values():
        gate.set()
    over = ends(fetcher, *(f"slow {number}" for number in range(len(slow))))
    assert not any(end.not_brought for end in over.values())


def test_a_turn_has_one_entry_at_least_and_further_ones_up_to_its_limit(fetcher, store, entries, monkeypatch):
    """Tiers read small entries together."""
    turns, fetch = [], store.fetch_each

    def noting(keys):
        turns.append(list(keys))
        return fetch(keys)

    monkeypatch.setattr(store, "fetch_each", noting)
    keys = [entry.key for entry in entries]
    size = keys[0].num_tokens
    for limit, expected in ((1, 1), (size, 1), (3 * size - 1, 2), (3 * size, 3), (TURN_TOKENS, len(keys))):
        turns.clear()
        store.empty_memory()
        monkeypatch.setattr(fetcher_module, "TURN_TOKENS", limit)
        fetcher.start("a", keys)
        assert not ends(fetcher, "a")["a"].not_brought
        assert turns == [keys[start : start + expected] for start in range(0, len(keys), expected)]
        fetcher.release("a")


def test_what_is_released_is_not_begun_and_not_gone_on_with(fetcher, disk, entries):
    busy = entries[:FETCHES_AT_ONCE]
    gates = [shut(disk, entry) for entry in busy]
    for number, entry in enumerate(busy):
        fetcher.start(f"busy {number}", [entry.key, entries[10 + number].key])
    for entry in busy:
        asked(disk, entry)
    fetcher.start("waits", [entries[20].key])
    fetcher.release("waits")
    fetcher.release("busy 0")
    for gate in gates:
        gate.set()
    finished(fetcher, *(f"busy {number}" for number in range(1, len(busy))))
    fetcher.start("last", [entries[21].key])
    finished(fetcher, "last")
    fetcher.close()
    assert entries[20].key not in disk.asked
    assert entries[10].key not in disk.asked
    assert entries[11].key in disk.asked
    assert fetcher.take_finished() == {}


def test_a_request_that_asks_again_waits_for_its_second_fetch(fetcher, disk, entries):
    first, second = shut(disk, entries[0]), shut(disk, entries[1])
    fetcher.start("a", [entries[0].key])
    asked(disk, entries[0])
    fetcher.start("a", [entries[1].key])
    first.set()
    asked(disk, entries[1])
    fetcher.start("b", [entries[2].key])
    assert ends(fetcher, "b").keys() == {"b"}
    assert fetcher.take_finished() == {}
    second.set()
    finished(fetcher, "a")


def test_more_than_can_wait_are_over_at_once(fetcher, disk, entries):
    gates = [shut(disk, entry) for entry in entries[:FETCHES_AT_ONCE]]
    for number in range(FETCHES_AT_ONCE + MAX_WAITING_FETCHES + 10):
        fetcher.start(str(number), [entries[number % FETCHES_AT_ONCE].key])
    over = fetcher.take_finished()
    assert len(over) >= 10
    for gate in gates:
        gate.set()
    finished(fetcher, *({str(number) for number in range(FETCHES_AT_ONCE + MAX_WAITING_FETCHES + 10)} - over.keys()))


def test_entries_without_room_stay_with_the_fetcher_until_they_are_released(disk, entries):
    """The host tier has room for one of a prompt's three entries."""
    store = ChunkStorageManager([HostTier(entries[0].nbytes), disk])
    fetcher = ChunkFetcher(store)
    wanted = entries[:3]
    fetcher.start("a", [entry.key for entry in wanted])
    finished(fetcher, "a")
    disk.asked.clear()
    for entry in wanted:
        found = store.lookup(entry.key, entry.tokens, CONTEXT, held=fetcher.kept_for("a"))
        assert found.entry is not None
        assert found.entry.tokens == entry.tokens
        assert found.tier == "disk"
    fetcher.release("a")
    results = [store.lookup(entry.key, entry.tokens, CONTEXT, held=fetcher.kept_for("a")) for entry in wanted]
    assert [result.reason for result in results].count(MissReason.SLOW) == 2
    assert disk.asked == [], "a lookup in a step asked the disk"
    assert store.get_stats()["pinned"] == 0
    fetcher.close()
    store.close()


def test_what_is_cleared_stays_with_nobody(disk, entries):
    """One request's entries have arrived, another's are still being read."""
    store = ChunkStorageManager([HostTier(1), disk])
    fetcher = ChunkFetcher(store)
    fetcher.start("there", [entries[0].key])
    finished(fetcher, "there")
    assert fetcher.kept_for("there")
    gate = shut(disk, entries[1])
    fetcher.start("on its way", [entries[1].key, entries[2].key])
    asked(disk, entries[1])
    fetcher.clear()
    store.clear()
    assert not fetcher.kept_for("there")
    gate.set()
    finished(fetcher, "on its way")
    assert not fetcher.kept_for("on its way")
    fetcher.start("later", [entries[3].key])  # no longer in the store
    finished(fetcher, "later")
    for name in ("there", "on its way", "later"):
        fetcher.release(name)
    assert fetcher._held_bytes == 0
    assert store.get_stats()["pinned"] == 0
    fetcher.close()
    store.close()


def test_a_deleted_entry_stays_with_nobody(disk, entries):
    store = ChunkStorageManager([HostTier(1), disk])
    fetcher = ChunkFetcher(store)
    wanted = [entry.key for entry in entries[:3]]
    fetcher.start("a", wanted)
    finished(fetcher, "a")
    fetcher.forget(wanted[1:2])
    assert set(fetcher.kept_for("a")) == {wanted[0], wanted[2]}
    fetcher.release("a")
    assert fetcher._held_bytes == 0
    fetcher.close()
    store.close()


def test_what_a_step_did_not_wait_for_is_brought_up_for_the_next(fetcher, disk, entries, store):
    assert store.lookup(entries[0].key, entries[0].tokens, CONTEXT, held={}).reason == MissReason.SLOW
    fetcher.bring_up([entries[0].key])
    deadline = time.monotonic() + PATIENCE_S
    while store.lookup(entries[0].key, entries[0].tokens, CONTEXT, held={}).entry is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert fetcher.take_finished() == {}


def test_a_fetch_that_cannot_start_is_over(fetcher, store, entries, monkeypatch):
    def fail(keys):
        raise RuntimeError("a failure made for this test")

    monkeypatch.setattr(store, "pin", fail)
    fetcher.start("a", [entries[0].key])
    finished(fetcher, "a")


def test_a_fetch_tells_what_it_did_not_bring(store, fetcher, entries, disk):
    """An entry that is in memory already counts as brought, and so does one for which memory has no room."""
    keys = [entry.key for entry in entries[:4]]
    store.put(entries[0])
    disk.delete(keys[1])
    disk.opened[keys[2]] = threading.Event()
    disk.opened[keys[2]].set()
    fetcher.start("request", keys)
    deadline = time.monotonic() + PATIENCE_S
    while not (over := fetcher.take_finished()):
        assert time.monotonic() < deadline
    assert over["request"].not_brought == {keys[1].content_hash}


def test_what_is_fetched_is_not_evicted_until_it_is_released(disk, entries):
    store = ChunkStorageManager([HostTier(3 * entries[0].nbytes), disk])
    fetcher = ChunkFetcher(store)
    fetcher.start("a", [entries[0].key])
    finished(fetcher, "a")
    store.fetch([entry.key for entry in entries[1:20]])
    assert store.is_near(entries[0].key)
    fetcher.release("a")
    assert store.get_stats()["pinned"] == 0
    fetcher.close()
    store.close()


def test_no_more_is_held_than_the_limit_and_the_rest_is_told(disk, entries, monkeypatch):
    """The host tier has no room for any of them."""
    monkeypatch.setattr(fetcher_module, "HELD_BYTES", 2 * entries[0].nbytes)
    store = ChunkStorageManager([HostTier(1), disk])
    fetcher = ChunkFetcher(store)
    fetcher.start("a", [entry.key for entry in entries[:3]])
    assert ends(fetcher, "a")["a"].not_brought == {entries[2].key.content_hash}
    assert set(fetcher.kept_for("a")) == {entry.key for entry in entries[:2]}
    fetcher.release("a")
    fetcher.start("b", [entries[2].key])
    assert not ends(fetcher, "b")["b"].not_brought
    fetcher.close()
    store.close()


def test_a_fetch_that_fails_is_over_and_brought_nothing(fetcher, store, entries, monkeypatch):
    def fail(keys):
        raise ValueError("a failure made for this test")

    monkeypatch.setattr(store, "fetch_each", fail)
    fetcher.start("a", [entries[0].key])
    assert ends(fetcher, "a")["a"].not_brought == {entries[0].key.content_hash}
    assert (fetcher.take_errors(), fetcher.take_errors()) == (1, 0)


def test_the_end_of_a_fetch_is_not_taken_for_that_of_the_next(fetcher, disk, entries):
    """The first has ended, and nobody was told before the request asked again."""
    fetcher.start("a", [entries[0].key])
    deadline = time.monotonic() + PATIENCE_S
    while not fetcher._finished:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    gate = shut(disk, entries[1])
    fetcher.start("a", [entries[1].key])
    assert fetcher.take_finished() == {}
    gate.set()
    finished(fetcher, "a")


def test_what_no_request_waits_for_is_not_held(disk, entries):
    store = ChunkStorageManager([HostTier(1), disk])
    fetcher = ChunkFetcher(store)
    fetcher.bring_up([entries[0].key])
    asked(disk, entries[0])
    fetcher.close()
    assert fetcher._held_bytes == 0
    store.close()


def test_only_fetches_that_wait_count_as_waiting(fetcher, store, entries, monkeypatch):
    monkeypatch.setattr(fetcher_module, "MAX_WAITING_FETCHES", 2)
    for entry in entries[:6]:
        fetcher.start("a", [entry.key])
        assert not ends(fetcher, "a")["a"].not_brought
