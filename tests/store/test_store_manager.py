"""The manager over host memory and disk: each rule in a test."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from store_helpers import CONTEXT, make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import (
    ChunkStorageManager,
    DiskTier,
    EntryInfo,
    Fetched,
    HostTier,
    LookupResult,
    MissReason,
    Tier,
    open_store,
    writer,
)

ONE = make_entry(0).nbytes
PLENTY = 2**30


def find(store: ChunkStorageManager, entry: ChunkKV) -> LookupResult:
    return store.lookup(entry.key, entry.tokens, entry.context)


def two_tiers(path: Path, host: int = PLENTY, disk: int = PLENTY) -> ChunkStorageManager:
    return ChunkStorageManager([HostTier(host), DiskTier(path, disk)])


class SlowTier(Tier):
    """A slower tier in memory, whose writes wait for a gate and can be made to fail."""

    name = "disk"

    def __init__(self) -> None:
        self.capacity = None
        self.entries: dict[ChunkKey, ChunkKV] = {}
        self.gate = threading.Event()
        self.is_asked = threading.Event()
        """Set once the first write has begun."""
        self.error: OSError | None = None

    def size(self, key: ChunkKey) -> int | None:
        return self.entries[key].nbytes if key in self.entries else None

    def get(self, key: ChunkKey) -> ChunkKV | None:
        if self.error:
            raise self.error
        return self.entries.get(key)

    def nbytes(self, entry: ChunkKV) -> int:
        return entry.nbytes

    def put(self, entry: ChunkKV) -> int:
        self.is_asked.set()
        assert self.gate.wait(20)
        if self.error:
            raise self.error
        self.entries[entry.key] = entry
        return entry.nbytes

    def delete(self, key: ChunkKey) -> None:
        self.entries.pop(key, None)

    def scan(self) -> Iterator[EntryInfo]:
        for key, entry in list(self.entries.items()):
            yield EntryInfo(key, entry.nbytes, self.name, False)


def test_hit_miss_and_counters() -> None:
    store = ChunkStorageManager([HostTier(PLENTY)])
    entry = make_entry(1)
    assert find(store, entry) == (None, None, MissReason.NEW)
    assert store.put(entry)
    found, tier, reason = find(store, entry)
    assert found is not None
    assert same(found, entry)
    assert (tier, reason) == ("host", None)
    assert store.lookup(entry.key, entry.tokens, ()).reason is MissReason.COLLISION
    assert store.lookup(entry.key, (9, 9, 9, 9), CONTEXT).reason is MissReason.COLLISION
    stats = store.get_stats()
    assert (stats["cache_hits"], stats["cache_misses"], stats["hit_rate"]) == (1, 3, 0.25)
    reasons = {reason: count for reason, count in stats["misses_by_reason"].items() if count}
    assert reasons == {"new": 1, "collision": 2}
    assert stats["current_memory_mb"] * 2**20 == ONE
    assert stats["total_chunks"] == 1


def test_an_entry_that_was_fetched_ahead_is_of_the_same_tokens_and_context() -> None:
    store, entry = ChunkStorageManager([HostTier(0), SlowTier()]), make_entry(1)
    held = {entry.key: Fetched(entry, "disk", False)}
    assert store.lookup(entry.key, entry.tokens, entry.context, held=held).entry is entry
    assert store.lookup(entry.key, (9, 9, 9, 9), CONTEXT, held=held).entry is None
    assert store.lookup(entry.key, entry.tokens, (), held=held).entry is None


def test_an_entry_larger_than_the_budget_is_refused() -> None:
    store = ChunkStorageManager([HostTier(ONE - 1)])
    assert not store.put(make_entry(1))
    assert not store.contains(make_entry(1).key)
    assert find(store, make_entry(1)).reason is MissReason.NEW


def test_refused_by_host_but_taken_by_disk(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=0)
    assert store.put(make_entry(1))
    store.flush()
    assert find(store, make_entry(1)).tier == "disk"
    assert not two_tiers(tmp_path / "other", host=0, disk=10).put(make_entry(2))


def test_entries_are_immutable(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=ONE)
    assert store.put(make_entry(1))
    assert store.put(make_entry(1, version=1))
    store.flush()
    store.put(make_entry(2))  # pushes 1 out of host
    assert store.put(make_entry(1, version=2))
    store.flush()
    found = find(store, make_entry(1)).entry
    assert found is not None
    assert same(found, make_entry(1))


def test_a_view_is_stored_with_memory_of_its_own() -> None:
    store = ChunkStorageManager([HostTier(PLENTY)])
    entry = make_entry(1)
    big = torch.cat([entry.data, entry.data], dim=1)
    view = ChunkKV(entry.key, entry.tokens, entry.context, entry.format, big[:, : entry.data.shape[1]])
    store.put(view)
    big.zero_()
    found = find(store, entry).entry
    assert found is not None
    assert same(found, entry)
    assert found.data.untyped_storage().nbytes() == found.nbytes


def test_evicted_is_told_apart_from_new() -> None:
    store = ChunkStorageManager([HostTier(2 * ONE)])
    for number in range(4):
        store.put(make_entry(number))
    reasons = [find(store, make_entry(number)).reason for number in range(5)]
    assert reasons.count(MissReason.EVICTED) == 2
    assert reasons[4] is MissReason.NEW
    assert store.get_stats()["evictions"] == 2
    assert [store.note_miss(make_entry(number).key) for number in range(5) if reasons[number]] == [
        reason for reason in reasons if reason
    ]
    misses = store.get_stats()["misses_by_reason"]
    assert (misses["evicted"], misses["new"], sum(misses.values())) == (4, 2, 6)


def test_disk_hit_is_promoted(tmp_path: Path) -> None:
    store = two_tiers(tmp_path)
    store.put(make_entry(1))
    store.close()
    store = two_tiers(tmp_path)
    assert [find(store, make_entry(1)).tier for _ in range(2)] == ["disk", "host"]
    assert store.get_stats()["promotions"] == 1
    assert [info.tier for info in store.scan()] == ["host"]


def test_host_eviction_demotes_what_disk_lost(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=ONE)
    store.put(make_entry(1))
    store.flush()
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    store.put(make_entry(2))
    store.flush()
    assert store.get_stats()["demotions"] == 1
    assert find(store, make_entry(1)).tier == "disk"


def test_restart_keeps_everything_bit_equal(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=3 * ONE)
    entries = [make_entry(number, tenant=f"t{number % 2}") for number in range(20)]
    assert all(store.put(entry) for entry in entries)
    store.close()
    store = two_tiers(tmp_path, host=3 * ONE)
    assert {info.key for info in store.scan()} == {entry.key for entry in entries}
    for entry in entries:
        found = find(store, entry).entry
        assert found is not None
        assert same(found, entry)


def test_a_smaller_budget_after_a_restart_evicts_the_oldest_at_the_next_write(tmp_path: Path) -> None:
    store = two_tiers(tmp_path)
    for number in range(6):
        store.put(make_entry(number))
        store.flush()
    store.close()
    sizes = [file.stat().st_size for file in tmp_path.rglob("*.safetensors")]
    budget = 3 * max(sizes) + 4096
    store = two_tiers(tmp_path, disk=budget)
    assert all(store.contains(make_entry(number).key) for number in range(6))
    store.put(make_entry(6))
    store.flush()
    there = [store.contains(make_entry(number).key) for number in range(7)]
    assert there == sorted(there)
    assert there[-1]
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) <= budget


def test_pins_nest_and_can_come_before_the_entry() -> None:
    store = ChunkStorageManager([HostTier(2 * ONE)])
    key = make_entry(0).key
    with store.pin([key]):
        with store.pin([key, key]):
            store.put(make_entry(0))
        for number in range(1, 10):
            assert store.put(make_entry(number))
        assert store.contains(key)
        assert store.get_stats()["pinned"] == 1
        assert [info.pinned for info in store.scan() if info.key == key] == [True]
        with store.pin([make_entry(9).key]):
            assert not store.put(make_entry(10))
            assert store.contains(make_entry(9).key)
    assert store.get_stats()["pinned"] == 0
    assert store.put(make_entry(20, tokens=8))  # takes the whole budget
    assert not store.contains(key)


def test_what_is_queued_can_be_looked_up_and_writes_are_not_waited_for() -> None:
    slow = SlowTier()
    store = ChunkStorageManager([HostTier(ONE), slow])
    for number in range(5):
        assert store.put(make_entry(number))
    for number in range(5):  # four of them are in the queue only
        found = find(store, make_entry(number)).entry
        assert found is not None
        assert same(found, make_entry(number))
    assert not slow.entries
    slow.gate.set()
    store.flush()
    assert len(slow.entries) == 5


def test_a_full_queue_makes_nobody_wait() -> None:
    """Entries that host memory holds anyway may wait without limit. Some of those that it evicts are dropped and
    counted."""
    slow = SlowTier()
    store = ChunkStorageManager([HostTier(3 * ONE), slow])
    store._stack.writer._max_bytes = 2 * ONE
    assert store.put(make_entry(0))
    assert slow.is_asked.wait(20)
    assert all(store.put(make_entry(number)) for number in range(1, 10))
    assert store.get_stats()["dropped_writes"] == 5
    slow.gate.set()
    store.flush()
    assert len(slow.entries) == 5
    there = [store.contains(make_entry(number).key) for number in range(10)]
    assert there.count(True) == 5


def test_a_last_copy_that_is_evicted_while_the_queue_is_full_is_counted() -> None:
    slow = SlowTier()
    store = ChunkStorageManager([HostTier(2 * ONE), slow])
    store._stack.writer._max_bytes = ONE
    slow.gate.set()
    slow.error = OSError(28, "No space left on device")
    assert all(store.put(make_entry(number)) for number in range(2))
    store.flush()
    slow.error = None
    slow.gate.clear()
    assert all(store.put(make_entry(number)) for number in range(2, 4))
    stats = store.get_stats()
    assert (stats["write_errors"], stats["demotions"], stats["dropped_writes"]) == (2, 1, 1)
    slow.gate.set()
    store.flush()
    assert set(slow.entries) == {make_entry(number).key for number in (0, 2, 3)}


def test_what_is_queued_when_memory_is_emptied_has_to_fit_into_the_queue() -> None:
    slow = SlowTier()
    store = ChunkStorageManager([HostTier(PLENTY), slow])
    store._stack.writer._max_bytes = 2 * ONE
    assert all(store.put(make_entry(number)) for number in range(5))
    assert slow.is_asked.wait(20)  # otherwise the entry that is written first may be one that is dropped
    store.empty_memory()
    assert store.get_stats()["dropped_writes"] == 3
    slow.gate.set()
    store.flush()
    assert len(slow.entries) == 2


def test_what_is_not_written_before_the_end_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.1)
    slow = SlowTier()
    store = ChunkStorageManager([HostTier(PLENTY), slow])
    assert all(store.put(make_entry(number)) for number in range(3))
    store.close()
    assert store.get_stats()["dropped_writes"] == 3
    assert "3 entries could not be written" in caplog.text
    slow.gate.set()


@pytest.mark.parametrize("is_far", [False, True])
def test_a_put_asks_no_slow_tier(is_far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's step calls put with a lock held. Only the writer may wait for an answer."""
    slow, asked_by = SlowTier(), set[threading.Thread]()
    slow.is_far = is_far
    slow.gate.set()
    size = slow.size

    def asked(key: ChunkKey) -> int | None:
        asked_by.add(threading.current_thread())
        return size(key)

    monkeypatch.setattr(slow, "size", asked)
    store = ChunkStorageManager([HostTier(2 * ONE), slow])
    assert all(store.put(make_entry(number)) for number in range(10))
    store.flush()
    assert len(slow.entries) == 10
    assert asked_by
    assert threading.current_thread() not in asked_by


def test_failing_writes_are_counted_and_logged_once_until_they_work(caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowTier()
    slow.gate.set()
    store = ChunkStorageManager([HostTier(PLENTY), slow])

    def put(numbers: range) -> int:
        caplog.clear()
        for number in numbers:
            assert store.put(make_entry(number))
        store.flush()
        return len(caplog.records)

    with caplog.at_level(logging.WARNING):
        slow.error = OSError(28, "No space left on device")
        assert put(range(5)) == 1
        assert put(range(5, 10)) == 0
        assert store.get_stats()["write_errors"] == 10
        slow.error = None
        assert put(range(10, 11)) == 0
        slow.error = OSError(28, "No space left on device")
        assert put(range(11, 14)) == 1
    assert all(find(store, make_entry(number)).tier == "host" for number in range(14))
    assert find(store, make_entry(99)).reason is MissReason.ERROR


def test_an_entry_that_arrives_during_a_lookup_is_not_forgotten() -> None:
    """Otherwise it would stay in memory without counting towards a budget."""
    host = HostTier(PLENTY)
    store = ChunkStorageManager([host])
    entry = make_entry(1)
    get = host.get

    def get_then_put(key: ChunkKey) -> ChunkKV | None:
        found = get(key)
        store.put(entry)
        return found

    host.get = get_then_put  # type: ignore[method-assign]
    assert find(store, entry).entry is None
    assert store.get_stats()["total_chunks"] == 1
    assert store.get_stats()["current_memory_mb"] * 2**20 == ONE


def test_clear_forgets_everything_everywhere(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=2 * ONE)
    for number in range(6):
        store.put(make_entry(number))
    store.clear()
    store.flush()
    assert [find(store, make_entry(number)).reason for number in range(6)] == [MissReason.NEW] * 6
    assert not list(store.scan())
    assert not list(tmp_path.rglob("*.safetensors"))
    stats = store.get_stats()
    assert (stats["current_memory_mb"], stats["disk_mb"], stats["total_chunks"]) == (0, 0, 0)
    assert store.put(make_entry(1))


def test_memory_is_emptied_and_the_disk_keeps_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes entries that are still being written there."""
    store, may_write = two_tiers(tmp_path, host=9 * ONE), threading.Event()
    put = DiskTier.put

    def waiting(tier: DiskTier, entry: ChunkKV) -> int:
        assert may_write.wait(30)
        return put(tier, entry)

    monkeypatch.setattr(DiskTier, "put", waiting)
    entries = [make_entry(number) for number in range(4)]
    for entry in entries:
        store.put(entry)
    store.keep([entries[0].key])
    store.take_changes()
    store.empty_memory(lambda key: key != entries[3].key)
    assert store.get_stats()["current_memory_mb"] * 2**20 == ONE
    assert store.take_changes() == dict.fromkeys(entry.key for entry in entries[:3])
    may_write.set()
    store.flush()
    assert {info.key: info.tier for info in store.scan()} == {
        entry.key: "host" if entry is entries[3] else "disk" for entry in entries
    }
    assert all(same(find(store, entry).entry, entry) for entry in entries)


def test_a_clear_lets_go_of_kept_entries(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=2 * ONE)
    kept = [make_entry(number) for number in range(2)]
    for entry in kept:
        store.put(entry)
    store.keep([entry.key for entry in kept])
    assert not store.put(make_entry(5)) or store.peek(make_entry(5).key) is None  # no room in memory
    store.clear(lambda key: key == kept[0].key)
    store.put(make_entry(6))
    assert store.peek(make_entry(6).key) is not None
    assert store.peek(kept[1].key) is not None
    store.put(kept[0])  # as new, and no longer protected
    for number in range(7, 12):
        store.put(make_entry(number))
    assert store.peek(kept[0].key) is None
    assert store.peek(kept[1].key) is not None


def test_many_threads(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=5 * ONE, disk=20 * (ONE + 2000))
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(60):
            entry = make_entry((seed * 7 + step * 5) % 40)
            with store.pin([entry.key]):
                found = find(store, entry).entry
                if found is not None and not same(found, entry):
                    wrong.append(step)
                store.put(entry)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store.flush()
    assert not wrong
    host, disk = store._stack.tiers
    held = sum(info.nbytes for info in host.scan())
    assert held == store._stack.policies["host"].nbytes <= 5 * ONE
    on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert on_disk == store._stack.policies["disk"].nbytes <= 20 * (ONE + 2000)
    assert {info.key for info in store.scan()} == {i.key for t in (host, disk) for i in t.scan()}


@pytest.mark.parametrize("where", ["file/below", "/proc/kvmosaic"])
def test_an_unusable_directory_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        store = open_store(load_config(disk_path=tmp_path / where, host_memory=10 * ONE))
    assert len(caplog.records) == 1
    assert "disk_path" in caplog.text
    assert store.put(make_entry(1))
    assert find(store, make_entry(1)).tier == "host"


def test_open_store_follows_the_configuration(tmp_path: Path) -> None:
    store = open_store(load_config(disk_path=tmp_path / "a/b", host_memory=ONE, disk_space=PLENTY))
    for number in range(3):
        store.put(make_entry(number))
    store.close()
    assert len(list((tmp_path / "a/b").rglob("*.safetensors"))) == 3
    assert store.get_stats()["current_memory_mb"] * 2**20 == ONE
    assert "disk" not in open_store(load_config()).get_stats()["hits_by_tier"]


def test_a_damaged_file_that_cannot_be_moved_does_not_block_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the directory has become read-only, the entry must still be kept in host memory."""
    entry = make_entry(1)
    writer = two_tiers(tmp_path)
    writer.put(entry)
    writer.close()
    store = two_tiers(tmp_path)
    [file] = tmp_path.rglob("*.safetensors")
    file.write_bytes(b"damaged")
    monkeypatch.setattr(os, "rename", _refuse)
    monkeypatch.setattr(os, "replace", _refuse)
    assert find(store, entry).reason == MissReason.CORRUPT
    assert store.put(entry)
    assert find(store, entry).tier == "host"


def _refuse(*args: object, **folders: object) -> None:
    raise PermissionError("read-only")


class UnreachableTier(HostTier):
    """A tier that cannot be reached."""

    def put(self, entry: ChunkKV) -> int:
        raise OSError("unreachable")

    def scan(self) -> Iterator[EntryInfo]:
        raise OSError("unreachable")


def test_a_tier_that_is_down_from_the_start_stops_nobody() -> None:
    store = ChunkStorageManager([UnreachableTier(PLENTY)])
    assert not store.put(make_entry(1))
    store.clear()
    assert store.get_stats()["write_errors"] == 1


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("CUDA error: out of memory")])
def test_memory_that_cannot_be_had_is_a_write_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises its own error for it, which must not end an engine's step."""

    def fail(*args: object) -> None:
        raise error

    store = ChunkStorageManager([HostTier(ONE), SlowTier()])
    assert store.put(make_entry(1))
    monkeypatch.setattr("kvmosaic.store.tiers.host.in_host_memory", fail)
    monkeypatch.setattr(HostTier, "scan", fail)
    assert store.put(make_entry(2))  # the slow tier is about to get it
    assert store.get_stats()["write_errors"] == 1
    for tier in store._stack.tiers:
        if isinstance(tier, SlowTier):
            tier.gate.set()
    store.clear()
    store.close()


def test_opening_with_a_smaller_budget_deletes_nothing(tmp_path: Path) -> None:
    store = two_tiers(tmp_path)
    entries = [make_entry(n) for n in range(4)]
    for entry in entries:
        store.put(entry)
    store.close()
    two_tiers(tmp_path, disk=0).close()
    again = two_tiers(tmp_path)
    assert all(find(again, entry).tier == "disk" for entry in entries)


def test_a_pipe_named_like_an_entry_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{'0' * 32}-5.safetensors")
    assert not list(two_tiers(tmp_path).scan())


# --- facts about entries, and operations on single ones


def test_age_hits_and_kind_are_known_and_what_files_tell_outlives_a_process(tmp_path: Path) -> None:
    store, start = two_tiers(tmp_path), time.time()
    tail, document, unknown = make_entry(1), make_entry(2), make_entry(3)
    store.put(replace(tail, kind="system-tail"))
    store.put(replace(document, kind="document"))
    store.put(unknown)
    for _ in range(3):
        find(store, document)
    store.lookup(tail.key, tail.tokens, tail.context, counted=False)

    def told(store: ChunkStorageManager) -> dict[ChunkKey, tuple[int | None, str | None]]:
        infos = list(store.scan())
        assert all(info.since is not None and start - 1 < info.since < time.time() + 1 for info in infos)
        return {info.key: (info.hits, info.kind) for info in infos}

    assert told(store) == {tail.key: (0, "system-tail"), document.key: (3, "document"), unknown.key: (0, None)}
    store.close()
    later = two_tiers(tmp_path)
    assert told(later) == {tail.key: (0, "system-tail"), document.key: (0, "document"), unknown.key: (0, None)}
    found = find(later, document).entry
    assert found is not None
    assert found.kind == "document"
    [file, *_] = tmp_path.rglob(f"{document.key.content_hash.hex()}*")
    os.utime(file, (1000, 1000))
    assert [info.since for info in two_tiers(tmp_path).scan() if info.key == document.key] == [1000]


def test_what_is_kept_is_not_evicted_until_it_is_let_go() -> None:
    store = ChunkStorageManager([HostTier(ONE)])
    kept = make_entry(0)
    store.put(kept)
    store.keep([kept.key])
    store.keep([kept.key])
    assert not store.put(make_entry(1))
    assert store.contains(kept.key)
    store.let_go([kept.key])
    store.let_go([kept.key])
    assert store.get_stats()["pinned"] == 0
    assert store.put(make_entry(1))
    assert not store.contains(kept.key)


def test_single_entries_are_removed_from_all_tiers_others_stay(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=2 * ONE)
    for number in range(4):
        store.put(make_entry(number))
    store.keep([make_entry(0).key])
    store.remove([make_entry(0).key, make_entry(3).key, make_entry(9).key])  # some are not on disk yet
    assert [number for number in range(4) if find(store, make_entry(number)).entry] == [1, 2]
    assert store.get_stats()["pinned"] == 0
    store.close()
    assert {info.key for info in two_tiers(tmp_path).scan()} == {make_entry(1).key, make_entry(2).key}


def test_only_memory_is_peeked_into(tmp_path: Path) -> None:
    store = two_tiers(tmp_path, host=ONE)
    for number in range(2):
        store.put(make_entry(number))
    store.flush()
    peeked = [store.peek(make_entry(number).key) is not None for number in range(2)]
    assert sorted(peeked) == [False, True]
    assert store.get_stats()["cache_hits"] == 0
