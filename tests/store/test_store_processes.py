"""Several processes and one directory, and a disk that is really full."""

import multiprocessing
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from store_helpers import make_entry, same

from kvmosaic.store import ChunkStorageManager, DiskTier, HostTier

SPAWN = multiprocessing.get_context("spawn")
ONE = make_entry(0).nbytes


def open_at(root: Path, disk: int = 2**30) -> ChunkStorageManager:
    return ChunkStorageManager([HostTier(4 * ONE), DiskTier(root, disk)])


def use_in_turns(root: Path, who: int, disk: int, results: Any) -> None:
    """Put and look up the same keys as the other processes, in another order."""
    store = open_at(root, disk)
    wrong = hits = 0
    for step in range(200):
        entry = make_entry((step * (7 if who else 11)) % 40)
        found = store.lookup(entry.key, entry.tokens, entry.context).entry
        if found is None:
            store.put(entry)
        else:
            hits += 1
            wrong += not same(found, entry)
    store.close()
    stats = store.get_stats()
    results.put((wrong, hits, stats["corrupt_set_aside"], stats["write_errors"]))


@pytest.mark.slow
@pytest.mark.parametrize("disk", [2**30, 15 * (ONE + 1000)], ids=["plenty", "evicting"])
def test_two_processes_write_and_read_one_directory(tmp_path: Path, disk: int) -> None:
    results = SPAWN.Queue()
    workers = [SPAWN.Process(target=use_in_turns, args=(tmp_path, who, disk, results)) for who in range(2)]
    for worker in workers:
        worker.start()
    outcomes = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    for wrong, hits, corrupt, errors in outcomes:
        assert (wrong, corrupt, errors) == (0, 0, 0)
        assert hits > 0
    assert not list((tmp_path / "incoming").iterdir())
    if disk == 2**30:
        store = open_at(tmp_path)
        assert all(store.contains(make_entry(number).key) for number in range(40))


def put_numbers(root: Path, numbers: range) -> None:
    store = open_at(root)
    for number in numbers:
        store.put(make_entry(number))
    # Without a close, the writer finishes before the interpreter exits.


def test_what_another_process_writes_and_removes_is_seen(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    worker = SPAWN.Process(target=put_numbers, args=(tmp_path, range(10)))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    for number in range(10):
        entry = make_entry(number)
        found, tier, _ = store.lookup(entry.key, entry.tokens, entry.context)
        assert tier == "disk"
        assert found is not None
        assert same(found, entry)
    assert store.get_stats()["total_chunks"] == 10
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    lost = [make_entry(number) for number in range(10)]
    assert sum(store.lookup(entry.key, entry.tokens, entry.context).entry is None for entry in lost) == 6
    stats = store.get_stats()
    assert (stats["misses_by_reason"]["error"], stats["corrupt_set_aside"]) == (0, 0)


def put_with_full_disk(root: Path, results: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = open_at(root)
    store.put(make_entry(0))
    store.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    taken = [store.put(make_entry(number)) for number in (1, 2)]
    store.flush()
    tiers = [store.lookup(e.key, e.tokens, e.context).tier for e in map(make_entry, range(3))]
    errors = store.get_stats()["write_errors"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.put(make_entry(3))
    store.close()
    results.put((taken, tiers, errors, sorted(os.listdir(next(root.glob("*/*/*"))))))


def test_a_full_disk_loses_nothing_and_leaves_no_half_file(tmp_path: Path) -> None:
    results = SPAWN.Queue()
    worker = SPAWN.Process(target=put_with_full_disk, args=(tmp_path, results))
    worker.start()
    taken, tiers, errors, files = results.get(timeout=60)
    worker.join(60)
    assert worker.exitcode == 0
    assert taken == [True, True]
    assert tiers == ["host", "host", "host"]
    assert errors == 2
    assert len(files) == 2
    assert all(name.endswith(".safetensors") for name in files)
    entry = make_entry(3)
    assert open_at(tmp_path).lookup(entry.key, entry.tokens, entry.context).tier == "disk"
