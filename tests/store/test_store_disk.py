"""Entries as files: paths, checksums, damage, foreign files."""

import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from store_helpers import make_entry, same

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import ChunkStorageManager, CorruptEntryError, DiskTier, HostTier, MissReason
from kvmosaic.store.files import READS_ATTRIBUTE
from kvmosaic.store.seal import Seal
from kvmosaic.store.tiers.disk import entry_path

PLENTY = 2**30
texts = st.text(st.characters(codec="utf-8"), max_size=150) | st.sampled_from(
    ["", ".", "..", "set-aside", "a/b", "%"]
)
keys = st.builds(ChunkKey, st.binary(min_size=16, max_size=16), st.integers(1, 10**6), texts, texts, texts)

NAMED = ("content_hash", "num_tokens", "model", "fingerprint", "tenant")


@given(keys, keys)
def test_path_and_key(key: ChunkKey, other: ChunkKey) -> None:
    path = entry_path(key)
    assert len(path.parts) == 4
    assert not path.is_absolute()
    assert all(part not in (".", "..") and len(part.encode()) <= 200 for part in path.parts)
    assert path.parts[0] != "set-aside"
    for each in (other, *(replace(key, **{name: getattr(other, name)}) for name in NAMED)):
        assert (entry_path(each) == path) == (each == key)
    if len(quote(key.model, safe="")) <= 100 and key.model not in ("", ".", "..", "set-aside"):
        assert unquote(path.parts[1]) == key.model


def test_lookalike_names_get_folders_of_their_own() -> None:
    names = [
        "",
        "%",
        ".",
        "%.",
        "..",
        "%2E%2E",
        "set-aside",
        "%set-aside",
        "a/b",
        "a%2Fb",
        "a",
        "A",
        "a" * 300,
        "a" * 301,
    ]
    folders = {entry_path(ChunkKey(bytes(16), 1, "m", "f", name)).parts[0] for name in names}
    assert len(folders) == len(names)
    assert not folders & {"", ".", "..", "set-aside"}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_roundtrip_of_every_dtype_and_a_slice_of_heads(tmp_path: Path, dtype: torch.dtype) -> None:
    entry = make_entry(1, tokens=7, heads=4, dtype=dtype)
    tier = DiskTier(tmp_path, PLENTY)
    size = tier.put(entry)
    assert size == tier.size(entry.key) <= tier.nbytes(entry)
    found = tier.get(entry.key)
    assert found is not None
    assert same(found, entry)
    with safe_open(tmp_path / entry_path(entry.key), "pt") as file:
        heads = file.get_slice("kv")[1:3]
        assert torch.equal(heads.view(torch.uint8), entry.data[1:3].contiguous().view(torch.uint8))
        assert tuple(file.get_tensor("tokens").tolist()) == entry.tokens
        assert tuple(file.get_tensor("context").tolist()) == entry.context


ENTRY = make_entry(5, heads=3)


@pytest.mark.parametrize("heads", ["all", "0-1of4", "2-3of4L0-1"])
def test_a_start_lists_entries_of_any_heads(tmp_path: Path, heads: str) -> None:
    entry = make_entry(1)
    entry = replace(entry, key=replace(entry.key, heads=heads))
    DiskTier(tmp_path, 10**6).put(entry)
    assert [info.key for info in DiskTier(tmp_path, 10**6).scan()] == [entry.key]


def test_files_keep_how_often_engines_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tool = DiskTier(tmp_path, PLENTY, counts_reads=True), DiskTier(tmp_path, PLENTY)
    engine.put(ENTRY)
    probe = tmp_path / "probe"
    probe.touch()
    try:
        os.setxattr(probe, READS_ATTRIBUTE, b"1")
    except OSError:
        pytest.skip("this filesystem has no extended attributes")
    for reads in range(3):
        assert [info.hits for info in tool.scan()] == [reads]
        assert engine.get(ENTRY.key) is not None
        assert tool.get(ENTRY.key) is not None
    for foreign in (b"many", b"9" * 5000):
        os.setxattr(tmp_path / entry_path(ENTRY.key), READS_ATTRIBUTE, foreign[:3000])
        assert engine.get(ENTRY.key) is not None
        assert len(list(engine.scan())) == 1

    def fail(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no such attributes")

    monkeypatch.setattr(os, "getxattr", fail)
    assert engine.get(ENTRY.key) is not None
    assert [info.hits for info in tool.scan()] == [None]


def test_room_is_made_for_the_whole_file(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, PLENTY)
    for entry in (make_entry(1, heads=128, tokens=1), make_entry(2, tenant="ü" * 3000)):
        assert tier.put(entry) <= tier.nbytes(entry)


def test_a_half_written_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / entry_path(ENTRY.key)

    def fail_halfway(folder: int, name: str, entry: ChunkKV, seal: Seal) -> None:
        with open(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=folder), "wb") as file:
            file.write(b"half")
        assert os.fstat(folder).st_dev == final.parent.stat().st_dev  # otherwise it could not be moved in one step
        assert not final.exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvmosaic.store.tiers.disk.write_entry", fail_halfway)
    with pytest.raises(OSError, match="No space"):
        DiskTier(tmp_path, PLENTY).put(ENTRY)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    root = tmp_path_factory.mktemp("intact")
    DiskTier(root, PLENTY).put(ENTRY)
    return (root / entry_path(ENTRY.key)).read_bytes()


def check_damaged(root: Path, content: bytes) -> bool:
    """Serve a damaged file that is found at start or later. Returns whether it was set aside."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    path = root / entry_path(ENTRY.key)
    store = ChunkStorageManager([HostTier(PLENTY), DiskTier(root, PLENTY)])
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    result = store.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context)
    stats = store.get_stats()
    aside = [file.read_bytes() for file in (root / "set-aside").rglob("*") if file.is_file()]
    if result.entry is not None:
        assert same(result.entry, ENTRY)
        assert not aside
        return False
    assert result.reason is MissReason.CORRUPT
    assert stats["misses_by_reason"]["corrupt"] == stats["corrupt_set_aside"] == 1
    assert aside == [content]
    assert not path.exists()
    assert not store.contains(ENTRY.key)
    # The same file is not served either if it is found at start.
    path.write_bytes(content)
    store = ChunkStorageManager([HostTier(PLENTY), DiskTier(root, PLENTY)])
    assert store.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context).entry is None
    assert store.get_stats()["corrupt_set_aside"] == 1
    assert store.put(ENTRY)
    store.close()
    assert DiskTier(root, PLENTY).get(ENTRY.key) is not None
    return True


relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(st.data())
def test_flipped_bytes_never_yield_another_entry(tmp_path: Path, intact: bytes, data: st.DataObject) -> None:
    content = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(intact) - 1))] ^= data.draw(st.integers(1, 255))
    check_damaged(tmp_path / "store", bytes(content))


def test_every_single_byte_of_the_data_is_covered(tmp_path: Path, intact: bytes) -> None:
    tier = DiskTier(tmp_path, PLENTY)
    path = tmp_path / entry_path(ENTRY.key)
    path.parent.mkdir(parents=True)
    start = 8 + int.from_bytes(intact[:8], "little")
    for offset in range(start, len(intact)):
        content = bytearray(intact)
        content[offset] ^= 1
        path.write_bytes(content)
        with pytest.raises(CorruptEntryError):
            tier.get(ENTRY.key)


@relaxed
@given(st.data())
def test_truncated_or_longer_files_are_set_aside(tmp_path: Path, intact: bytes, data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, len(intact) - 1))
    assert check_damaged(tmp_path / "store", intact[:keep])
    assert check_damaged(tmp_path / "store", intact + data.draw(st.binary(min_size=1, max_size=20)))


def test_foreign_files(tmp_path: Path, intact: bytes) -> None:
    """A file with foreign content, one of another key, and one that is merely in the same directory."""
    root = tmp_path / "store"
    save_file({"kv": torch.zeros(3)}, tmp_path / "x")
    assert check_damaged(root, (tmp_path / "x").read_bytes())
    assert check_damaged(root, b"hello")
    assert check_damaged(root, (2).to_bytes(8, "little") + b"[]")
    (tmp_path / "other").mkdir()
    DiskTier(tmp_path / "other", PLENTY).put(make_entry(6, heads=3))
    assert check_damaged(root, (tmp_path / "other" / entry_path(make_entry(6).key)).read_bytes())
    path = root / entry_path(ENTRY.key)
    shutil.copy(tmp_path / "other" / entry_path(make_entry(6).key), path)
    tier = DiskTier(root, PLENTY)
    assert not list(tier.scan())
    assert tier.set_aside == 1
    weights = root / "some/model/main/model.safetensors"
    weights.parent.mkdir(parents=True)
    save_file({"w": torch.zeros(3)}, weights)
    assert not list(DiskTier(root, PLENTY).scan())
    assert weights.exists()


def test_two_damaged_copies_of_one_entry_are_both_kept(tmp_path: Path, intact: bytes) -> None:
    tier = DiskTier(tmp_path, PLENTY)
    for _ in range(2):
        tier.put(ENTRY)
        (tmp_path / entry_path(ENTRY.key)).write_bytes(intact[:-1])
        with pytest.raises(CorruptEntryError):
            tier.get(ENTRY.key)
    assert len([file for file in (tmp_path / "set-aside").rglob("*") if file.is_file()]) == 2


def test_stale_temporary_files_are_removed_on_start(tmp_path: Path) -> None:
    DiskTier(tmp_path, PLENTY).put(ENTRY)
    folder = (tmp_path / entry_path(ENTRY.key)).parent
    old, new, foreign = tmp_path / "incoming" / "old", tmp_path / "incoming" / "new", folder / ".tmp-notes"
    for path in (old, new, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (time.time() - 4000,) * 2)
    DiskTier(tmp_path, PLENTY).prepare()
    assert [path.exists() for path in (old, new, foreign)] == [False, True, True]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """The tenant's folder is a file, so nothing can be created below it until it is removed."""
    store = ChunkStorageManager([HostTier(PLENTY), DiskTier(tmp_path, PLENTY)])
    (tmp_path / "default").touch()
    assert store.put(ENTRY)
    store.flush()
    assert store.get_stats()["write_errors"] == 1
    assert store.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context).tier == "host"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "default"]
    (tmp_path / "default").unlink()
    store.put(make_entry(6))
    store.close()
    assert store.get_stats()["disk_mb"] > 0


def test_24_mb_entry_is_read_and_verified_quickly(tmp_path: Path) -> None:
    entry = make_entry(1, tokens=192, heads=8, layers=32, k_dim=128, v_dim=128)
    assert entry.nbytes == 24 * 2**20
    tier = DiskTier(tmp_path, PLENTY)
    tier.put(entry)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        assert tier.get(entry.key) is not None
        times.append(time.perf_counter() - start)
    # About 7 ms on two slow cores. One more copy, or a slower hash, would show even on a busy machine.
    assert min(times) < 0.05
