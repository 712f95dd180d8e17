"""A directory to which several processes write: each asks cheaply for what the others stored, and notices them."""

import threading
from pathlib import Path

import pytest
from remote_servers import Valkey
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.store import ChunkStorageManager, DiskTier, HostTier, open_store
from kvmosaic.store.tiers import disk as disk_module

SOME = [make_entry(number) for number in range(6)]


def opened(path: Path, **settings: object) -> ChunkStorageManager:
    return open_store(load_config(disk_path=path, host_memory="1MiB", **settings))


def put(store: ChunkStorageManager, *entries: ChunkKV) -> None:
    assert all(map(store.put, entries))
    store.flush()


def test_an_entry_of_another_process_is_fetched_and_noticed(tmp_path: Path) -> None:
    ours, theirs = opened(tmp_path), opened(tmp_path)
    put(theirs, *SOME[:3])
    assert not ours.has_company
    fetched = list(ours.fetch_each([entry.key for entry in SOME]))
    assert [each.tier for each in fetched] == ["disk"] * 3
    assert all(same(each.entry, entry) for each, entry in zip(fetched, SOME, strict=False))
    assert ours.has_company
    assert not theirs.has_company


def test_an_entry_that_is_there_when_ours_is_to_be_written_is_noticed(tmp_path: Path) -> None:
    ours, theirs = opened(tmp_path), opened(tmp_path)
    put(theirs, SOME[0])
    put(ours, SOME[0])
    assert ours.has_company
    assert not theirs.has_company


@pytest.mark.parametrize("quota", [None, "1GiB"])
def test_a_process_that_is_alone_stays_alone(tmp_path: Path, quota: str | None) -> None:
    """Also with entries of earlier processes, and with its own, evicted or deleted and stored again."""
    put(opened(tmp_path), *SOME[:2])
    store = opened(tmp_path, tenant_quota=quota)
    put(store, *SOME)
    store.fetch(entry.key for entry in SOME)
    store.remove([SOME[0].key])
    store.flush()
    store.empty_memory()
    put(store, *SOME)
    store.fetch(entry.key for entry in SOME)
    assert all(store.lookup(entry.key, entry.tokens, entry.context).entry is not None for entry in SOME)
    assert not store.has_company


def test_an_entry_in_a_remote_store_is_no_company(tmp_path: Path) -> None:
    """Such a store is asked in any case."""
    server = Valkey(tmp_path)
    try:
        ours, theirs = (opened(tmp_path / name, remote=server.url) for name in ("ours", "theirs"))
        put(theirs, *SOME[:3])
        assert [each.tier for each in ours.fetch_each([entry.key for entry in SOME[1:]])] == ["remote"] * 2
        put(ours, SOME[0])  # which is there already
        assert not ours.has_company
        ours.close()
        theirs.close()
    finally:
        server.kill()


def test_a_miss_costs_one_look_at_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is opened once for all keys, and no file is."""
    store = opened(tmp_path)
    put(store, SOME[0])
    folders, looks = [], []
    below, look = disk_module.folder_below, disk_module._size_of
    monkeypatch.setattr(disk_module, "folder_below", lambda *at: (folders.append(at), below(*at))[1])
    monkeypatch.setattr(disk_module, "_size_of", lambda *at: (looks.append(at), look(*at))[1])
    monkeypatch.setattr(disk_module, "read_entry", None)
    assert not list(store.fetch_each([entry.key for entry in SOME[1:]]))
    assert (len(folders), len(looks)) == (1, 5)
    assert not list(store.fetch_each([make_entry(9).key]))
    assert (len(folders), len(looks)) == (2, 6)


def test_what_is_on_its_way_to_a_slow_tier_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a lookup right after that would not ask the tier, in which the entry has arrived meanwhile."""
    disk, may_write = DiskTier(tmp_path, 2**20), threading.Event()
    write = disk.put
    monkeypatch.setattr(disk, "put", lambda entry: (may_write.wait(60), write(entry))[1])
    store = ChunkStorageManager([HostTier(SOME[0].nbytes), disk])
    assert all(map(store.put, SOME[:3]))  # memory has room for one
    absent = store.absent([entry.key for entry in SOME])
    may_write.set()
    assert absent == {(1, entry.key) for entry in SOME[3:]}
    store.flush()
    for entry in SOME[:3]:
        assert store.lookup(entry.key, entry.tokens, entry.context, absent=absent).entry is not None
