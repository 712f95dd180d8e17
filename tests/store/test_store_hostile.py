"""Attackers who can write to a store can waste a lookup, but no time, no memory and no other requests' KV."""

import json
import os
import socket
import stat
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forgery import fields_of, forged
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import (
    ChunkStorageManager,
    CorruptEntryError,
    DiskTier,
    HostTier,
    MissReason,
    known_tiers,
    open_store,
)
from kvmosaic.store.tiers import disk, guarded
from kvmosaic.store.tiers.disk import INCOMING, SET_ASIDE, entry_path
from kvmosaic.store.tiers.guarded import GuardedTier

PLENTY = 2**30
ENTRY = make_entry(3)
MEMORY = 8 * 2**20
"""Maximum bytes that a lookup of a hostile file may use temporarily."""
LINES = 200_000
"""Maximum number of lines of Python that it may run: a hundred times the usual number."""

HEADERS: dict[str, dict[str, Any]] = {
    "a billion layers": {"layers": str(10**9)},
    "thirty million layers": {"layers": str(3 * 10**7)},
    "windows in all of many layers": {"layers": "20000", "windowed": " ".join(map(str, range(20_000)))},
    "the same window many times": {"windowed": " ".join(["0"] * 20_000), "tail": "1"},
    "windows in layers that are not there": {"windowed": "5 6", "tail": "1"},
    "windows that do not ascend": {"windowed": "1 0", "tail": "4"},
    "a billion heads": {"heads": str(10**9)},
    "a billion columns": {"k_dim": str(10**9)},
    "negative layers": {"layers": "-2", "heads": "-2"},
    "negative columns": {"k_dim": "-3", "v_dim": "11"},
    "a huge tail": {"tail": "9" * 4000, "windowed": "0"},
    "a number with thousands of digits": {"layers": "1" * 200_000},
    "a number that is none": {"layers": "2.0"},
    "other digits": {"layers": "\u0662"},
    "a dtype that is something else": {"dtype": "load"},
    "no text": {"layers": 2},
    "a list": {"head_checksums": ["0"] * 1000},
}


def planted(root: Path, content: bytes, key: ChunkKey = ENTRY.key) -> Path:
    path = root / entry_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def cheaply_found(store: ChunkStorageManager, entry: ChunkKV) -> Any:
    """A lookup that must use little memory and time. Time is counted in lines, because clocks are unreliable on a
    busy machine."""
    import sys

    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += 1
        assert lines < LINES, "a lookup of a hostile file runs for ever"
        return count

    tracemalloc.start()
    sys.settrace(count)
    try:
        result = store.lookup(entry.key, entry.tokens, entry.context)
    finally:
        sys.settrace(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MEMORY
    return result


@pytest.mark.parametrize("knows_format", [False, True], ids=["any format", "own format"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_hostile_header_costs_nothing(tmp_path: Path, header: str, knows_format: bool) -> None:
    settings = load_config(disk_path=tmp_path, host_memory=PLENTY)
    store = open_store(settings, kv_format=ENTRY.format) if knows_format else open_store(settings)
    path = planted(tmp_path, forged(ENTRY, HEADERS[header]))
    result = cheaply_found(store, ENTRY)
    assert (result.entry, result.reason) == (None, MissReason.CORRUPT)
    assert not path.exists()
    # It can be replaced.
    assert store.put(ENTRY)
    store.close()
    assert DiskTier(tmp_path, PLENTY).get(ENTRY.key) is not None


@pytest.mark.parametrize(
    "header",
    [
        {"kv": {"dtype": "BF16", "shape": [2, 64], "data_offsets": [20, 10**15]}},
        {"kv": {"dtype": "BF16", "shape": [2, 64], "data_offsets": [20.0, 276.0]}},
        {"kv": {"dtype": "BF16", "shape": [2, 64], "data_offsets": [True, False]}},
        {"kv": {"dtype": "BF16", "shape": [2, 64], "data_offsets": []}},
        {"kv": {"dtype": "BF16", "shape": [4, 32], "data_offsets": [20, 276]}},
        {"other": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
        {"__metadata__": []},
        {"__metadata__": {str(number): "" for number in range(20_000)}},
    ],
)
def test_hostile_tensors_cost_nothing(tmp_path: Path, header: dict[str, Any]) -> None:
    store = open_store(load_config(disk_path=tmp_path, host_memory=PLENTY), kv_format=ENTRY.format)
    planted(tmp_path, forged(ENTRY, header=header))
    assert cheaply_found(store, ENTRY).reason is MissReason.CORRUPT


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b'{"a":' * 40_000, b"9" * 200_000, b"\xff" * 1000, b"", b"1", b'"text"', b"[]", b"{}"]
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_what_is_no_header_costs_nothing(tmp_path: Path, text: bytes, is_listed: bool) -> None:
    """A lookup may meet the file first, or the list of entries at the start."""
    if is_listed:
        planted(tmp_path, len(text).to_bytes(8, "little") + text)
        assert not list(DiskTier(tmp_path, PLENTY).scan())
    store = ChunkStorageManager([HostTier(PLENTY), DiskTier(tmp_path, PLENTY)])
    planted(tmp_path, len(text).to_bytes(8, "little") + text)
    assert cheaply_found(store, ENTRY).reason is MissReason.CORRUPT


@pytest.mark.parametrize(
    ("tokens", "context", "kv", "fields"),
    [
        (16, 4, 2**41, {}),
        (16, 4, 2**26, {}),
        (2**26, 4, 256, {}),
        (16, 2**27, 256, {}),
        (16, 4, 2**41, {"layers": str(2**19), "k_dim": str(2**18 - 5)}),  # which is as much as it claims
    ],
    ids=["a terabyte of KV", "some KV", "tokens", "context", "a format of a terabyte"],
)
def test_a_file_that_claims_too_much_is_not_read(
    tmp_path: Path, tokens: int, context: int, kv: int, fields: dict[str, str]
) -> None:
    """A file with a hole takes no room on disk, but would take all memory."""
    store = ChunkStorageManager([HostTier(PLENTY), DiskTier(tmp_path, PLENTY)])
    ends = [tokens, tokens + context, tokens + context + kv]
    header = {
        "tokens": {"dtype": "I32", "shape": [tokens // 4], "data_offsets": [0, ends[0]]},
        "context": {"dtype": "I32", "shape": [context // 4], "data_offsets": [ends[0], ends[1]]},
        "kv": {"dtype": "BF16", "shape": [2, kv // 4 if fields else 64], "data_offsets": [ends[1], ends[2]]},
    }
    content = forged(ENTRY, fields, header=header)
    path = planted(tmp_path, content)
    os.truncate(path, 8 + int.from_bytes(content[:8], "little") + ends[2])
    assert cheaply_found(store, ENTRY).reason is MissReason.CORRUPT


def test_a_header_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    store = ChunkStorageManager([HostTier(PLENTY), DiskTier(tmp_path, PLENTY)])
    content = forged(ENTRY)
    length = int.from_bytes(content[:8], "little")
    blanks = 2 * MEMORY
    planted(tmp_path, (length + blanks).to_bytes(8, "little") + b" " * blanks + content[8:])
    assert cheaply_found(store, ENTRY).reason is MissReason.CORRUPT


@pytest.mark.parametrize("tokens", [3, 5, 1])
def test_the_number_of_tokens_is_the_keys(tmp_path: Path, tokens: int) -> None:
    tier = DiskTier(tmp_path, PLENTY)
    other = make_entry(3, tokens=tokens)
    content = forged(replace(other, key=ENTRY.key), kv=other.data.view(torch.uint8).numpy().tobytes())
    planted(tmp_path, content)
    with pytest.raises(CorruptEntryError):
        tier.get(ENTRY.key)


OTHERS = {
    "heads": make_entry(3, heads=4),
    "one head": make_entry(3, heads=1),
    "layers": make_entry(3, layers=3),
    "fewer columns": make_entry(3, k_dim=2),
    "columns moved": make_entry(3, k_dim=5, v_dim=3),
    "dtype of the same size": make_entry(3, dtype=torch.float16),
    "dtype of another size": make_entry(3, dtype=torch.float32),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_entry_of_another_format_is_never_returned(tmp_path: Path, other: str) -> None:
    """A valid entry, under the same key, in memory and on disk."""
    wrong = OTHERS[other]
    assert wrong.key == ENTRY.key
    writer = open_store(load_config(disk_path=tmp_path, host_memory=PLENTY))
    assert writer.put(wrong)
    writer.close()
    store = open_store(load_config(disk_path=tmp_path, host_memory=PLENTY), kv_format=ENTRY.format)
    store.fetch([ENTRY.key])
    result = store.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context)
    assert (result.entry, result.reason) == (None, MissReason.CORRUPT)
    assert not store.put(wrong)
    assert store.put(ENTRY)
    found = store.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context).entry
    assert found is not None
    assert same(found, ENTRY)
    store.close()
    stored = DiskTier(tmp_path, PLENTY).get(ENTRY.key)
    assert stored is not None
    assert same(stored, ENTRY)


@pytest.mark.parametrize("other", OTHERS)
def test_an_entry_of_another_format_is_not_even_returned_from_a_tier_that_checks_none(
    tmp_path: Path, other: str
) -> None:
    DiskTier(tmp_path, PLENTY).put(OTHERS[other])
    store = ChunkStorageManager([HostTier(PLENTY), DiskTier(tmp_path, PLENTY)], ENTRY.format)
    assert store.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context).reason is MissReason.CORRUPT
    assert not (tmp_path / entry_path(ENTRY.key)).exists()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    target = path.parent / "elsewhere"
    target.write_bytes(forged(ENTRY))
    path.symlink_to(target)


def broken_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def folder(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_PATH)  # names of sockets have to be short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only an administrator can make devices")


@pytest.fixture
def in_time() -> Callable[[Callable[[], Any]], Any]:
    """Runs something that must not hang."""

    def run(function: Callable[[], Any]) -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
        thread.start()
        thread.join(30)
        assert results, "it hangs"
        return results[0]

    return run


@pytest.mark.parametrize("make", [fifo, link, broken_link, folder, a_socket, device])
def test_what_is_no_file_in_place_of_an_entry(
    tmp_path: Path, make: Callable[[Path], None], in_time: Callable[[Callable[[], Any]], Any]
) -> None:
    path = tmp_path / entry_path(ENTRY.key)
    path.parent.mkdir(parents=True)
    make(path)
    store = in_time(lambda: ChunkStorageManager([HostTier(PLENTY), DiskTier(tmp_path, PLENTY)]))
    assert not list(in_time(lambda: list(store.scan())))
    assert not in_time(lambda: store.contains(ENTRY.key))
    result = in_time(lambda: store.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context))
    assert (result.entry, result.reason) == (None, MissReason.CORRUPT)
    assert in_time(lambda: store.put(ENTRY))
    in_time(lambda: store.close() or True)
    stored = in_time(lambda: DiskTier(tmp_path, PLENTY).get(ENTRY.key))
    assert same(stored, ENTRY)


@pytest.mark.parametrize("make", [fifo, link, folder, a_socket])
def test_a_writer_replaces_what_is_no_file(
    tmp_path: Path, make: Callable[[Path], None], in_time: Callable[[Callable[[], Any]], Any]
) -> None:
    """The writer has not read it before. A folder stays there, and the write fails."""
    path = tmp_path / entry_path(ENTRY.key)
    path.parent.mkdir(parents=True)
    make(path)
    store = ChunkStorageManager([HostTier(PLENTY), DiskTier(tmp_path, PLENTY)])
    assert in_time(lambda: store.put(ENTRY))
    in_time(lambda: store.close() or True)
    if make is folder:
        assert store.get_stats()["write_errors"] == 1
        return
    assert stat.S_ISREG(path.lstat().st_mode)
    if make is link:
        assert (path.parent / "elsewhere").read_bytes() == forged(ENTRY)


@pytest.mark.parametrize("name", [INCOMING, SET_ASIDE, "default"])
@pytest.mark.parametrize("make", [fifo, folder, a_socket])
def test_what_stands_in_place_of_our_folders_leads_nowhere(
    tmp_path: Path, name: str, make: Callable[[Path], None], in_time: Callable[[Callable[[], Any]], Any]
) -> None:
    """``folder``: a link to a foreign folder that contains an old file."""
    root, theirs = tmp_path / "store", tmp_path / "theirs"
    root.mkdir()
    theirs.mkdir()
    precious = theirs / "precious"
    precious.write_text("mine")
    os.utime(precious, (1, 1))
    if make is folder:
        (root / name).symlink_to(theirs)
    else:
        make(root / name)
    store = in_time(lambda: ChunkStorageManager([HostTier(PLENTY), DiskTier(root, PLENTY)]))
    assert in_time(lambda: store.put(ENTRY))
    in_time(lambda: store.flush() or True)
    if name == SET_ASIDE:  # an entry that is damaged cannot be moved there
        path = root / entry_path(ENTRY.key)
        path.write_bytes(b"damaged")
        again = ChunkStorageManager([HostTier(PLENTY), DiskTier(root, PLENTY)])
        assert in_time(lambda: again.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context)).entry is None
        DiskTier(root, PLENTY).remove_set_aside()
    else:
        assert store.get_stats()["write_errors"] == 1
    in_time(lambda: store.clear() or True)
    assert [path.name for path in theirs.rglob("*")] == ["precious"]
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_linked_folder_is_neither_read_nor_deleted_from(tmp_path: Path, depth: int) -> None:
    """The link leads to another store with a valid entry."""
    root, theirs = tmp_path / "store", tmp_path / "theirs"
    for folder_ in (root, theirs):
        folder_.mkdir()
    DiskTier(theirs, PLENTY).put(ENTRY)
    inside = Path(*entry_path(ENTRY.key).parts[:depth])
    (root / inside).parent.mkdir(parents=True, exist_ok=True)
    (root / inside).symlink_to(theirs / inside)
    tier = DiskTier(root, PLENTY)
    assert tier.size(ENTRY.key) is None
    assert tier.get(ENTRY.key) is None
    assert not list(tier.scan())
    tier.delete(ENTRY.key)
    with pytest.raises(NotADirectoryError):
        tier.put(make_entry(2))
    damaged = theirs / entry_path(ENTRY.key)
    damaged.write_bytes(b"damaged, and not ours to move")
    assert tier.get(ENTRY.key) is None
    assert [path.name for path in theirs.rglob("*.safetensors")] == [damaged.name]


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "elsewhere")
    tier = DiskTier(tmp_path / "store", PLENTY)
    tier.prepare()
    tier.put(ENTRY)
    assert [info.key for info in tier.scan()] == [ENTRY.key]
    found = tier.get(ENTRY.key)
    assert found is not None
    assert same(found, ENTRY)
    tier.delete(ENTRY.key)
    assert tier.size(ENTRY.key) is None


def test_files_are_this_users_alone(tmp_path: Path) -> None:
    """This includes folders that an earlier release made accessible to all users."""
    root = tmp_path / "new" / "store"
    before = os.umask(0)
    try:
        tier = DiskTier(root, PLENTY)
        tier.prepare()
        old = (root / entry_path(ENTRY.key)).parent
        old.mkdir(parents=True)
        (root / INCOMING).mkdir()
        tier.put(ENTRY)
        tier.put(make_entry(4, tenant="another"))
        (root / entry_path(ENTRY.key)).write_bytes(b"damaged")
        with pytest.raises(CorruptEntryError):
            tier.get(ENTRY.key)
        tier.put(ENTRY)
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.lstat().st_mode) == wanted, path


def test_a_name_cannot_stand_for_a_billion_heads(tmp_path: Path) -> None:
    """Otherwise such a name, listed from disk or a remote store, would be split into as many names."""
    text = str(ENTRY.key).replace("@all@", "@0-999999998of999999999L0-1@")
    with pytest.raises(ValueError, match="not a chunk key"):
        ChunkKey.parse(text)
    fields = fields_of(ENTRY) | {"key": text}
    name = f"{ENTRY.key.content_hash.hex()}-4-0-999999998of999999999L0-1.safetensors"
    path = (tmp_path / entry_path(ENTRY.key)).parent / name
    path.parent.mkdir(parents=True)
    path.write_bytes(forged(ENTRY, fields))
    assert not list(DiskTier(tmp_path, PLENTY).scan())


def test_forgery_is_faithful(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    planted(tmp_path, forged(ENTRY))
    found = DiskTier(tmp_path, PLENTY).get(ENTRY.key)
    assert found is not None
    assert same(found, ENTRY)
    assert json.loads(forged(ENTRY)[8:].split(b"}}")[0] + b"}}")


def test_a_long_key_is_named_briefly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = replace(ENTRY.key, model="m" * 100_000)
    planted(tmp_path, forged(ENTRY, {"key": str(other)}))
    tier = DiskTier(tmp_path, PLENTY)
    assert not list(tier.scan())
    assert tier.set_aside == 1
    assert "another key" in caplog.text
    assert len(caplog.text) < 2000


def test_only_so_many_planted_entries_are_learnt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are found when they are asked for, and what is known is not forgotten."""
    monkeypatch.setattr(known_tiers, "MAX_LISTED", 5)
    monkeypatch.setattr(guarded, "PAGE", 3)
    monkeypatch.setattr(disk, "SORTED_AT_ONCE", 2)
    entries = [make_entry(number) for number in range(9)]
    tier = DiskTier(tmp_path, PLENTY)
    for entry in entries:
        tier.put(entry)
    assert {info.key for info in GuardedTier(tier, "the disk").scan()} == {entry.key for entry in entries}
    store = open_store(load_config(disk_path=tmp_path, host_memory=PLENTY))
    assert len(list(store.scan())) == 5
    assert len(store.take_changes()) == 5
    for entry in entries:
        assert store.lookup(entry.key, entry.tokens, entry.context).entry is not None
    assert len(list(store.scan())) == 9
    assert store._stack._list(1)
    assert len(list(store.scan())) == 9
    assert caplog.text.count("has more than 5 entries") == 1
    store.clear()
    store.flush()
    assert not list(tier.scan())
    store.close()
