"""With a store key, only entries of writers who have the key are used."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forgery import forged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_servers import Valkey
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.store_key import STORE_KEY_VARIABLE, StoreKey
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.store import ChunkStorageManager, CorruptEntryError, DiskTier, MissReason, open_store
from kvmosaic.store.codec import Encoding
from kvmosaic.store.remote.heads import join, values_of
from kvmosaic.store.remote.incoming import IncomingEntry
from kvmosaic.store.remote.keys import part_keys
from kvmosaic.store.seal import EntryCheck, Seal, hexdigest
from kvmosaic.store.tiers.disk import entry_path
from kvmosaic.store.tiers.remote import open_remote_tier
from tests.cli.command import run_here

OURS, THEIRS = "a key that only we have", "a key that others have"
ENTRY = make_entry(3, heads=3)
PLENTY = 2**30


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_KEY_VARIABLE, OURS)


def sealed(secret: str) -> Seal:
    return Seal(StoreKey(secret.encode()))


def opened(root: Path) -> ChunkStorageManager:
    return open_store(load_config(disk_path=root, host_memory=PLENTY), kv_format=ENTRY.format)


def planted(root: Path, content: bytes) -> Path:
    path = root / entry_path(ENTRY.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_what_we_wrote_is_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.put(ENTRY)
    store.close()
    found = opened(tmp_path).lookup(ENTRY.key, ENTRY.tokens, ENTRY.context)
    assert found.tier == "disk"
    assert found.entry is not None
    assert same(found.entry, ENTRY)


@pytest.mark.parametrize("by", ["nobody's key", "another key", "nobody's key, with the right format and other KV"])
def test_what_others_plant_is_a_counted_miss(tmp_path: Path, by: str) -> None:
    other = make_entry(3, heads=3, version=1)
    if by == "another key":
        DiskTier(tmp_path, PLENTY, check=EntryCheck(sealed(THEIRS))).put(ENTRY)
    else:
        planted(tmp_path, forged(ENTRY if by == "nobody's key" else other))
    store = opened(tmp_path)
    result = store.lookup(ENTRY.key, ENTRY.tokens, ENTRY.context)
    assert (result.entry, result.reason) == (None, MissReason.CORRUPT)
    assert store.get_stats()["misses_by_reason"]["corrupt"] == store.get_stats()["corrupt_set_aside"] == 1
    assert store.put(ENTRY)
    store.close()
    assert opened(tmp_path).lookup(ENTRY.key, ENTRY.tokens, ENTRY.context).tier == "disk"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_pieces_of_sealed_entries_make_no_other(tmp_path: Path, data: st.DataObject) -> None:
    """An attacker without the key swaps heads, headers and bytes of three entries: two of one key, and one of
    another."""
    sources = [ENTRY, make_entry(3, heads=3, version=1), replace(make_entry(4, heads=3), format=ENTRY.format)]
    smalls, heads = [], []
    for entry in sources:
        encoding = Encoding(entry, sealed(OURS))
        smalls.append(bytes(encoding.value(str(entry.key), 0, 3)[0]))
        heads += [bytes(head) for head in encoding.kv]
    small = data.draw(st.integers(0, 2))
    parts = [data.draw(st.integers(0, 8)) for _ in range(3)]
    content = bytearray(smalls[small] + b"".join(heads[part] for part in parts))
    flipped = data.draw(st.none() | st.integers(0, len(content) - 1))
    if flipped is not None:
        content[flipped] ^= data.draw(st.integers(1, 255))
    planted(tmp_path, bytes(content))
    tier = DiskTier(tmp_path, PLENTY, check=EntryCheck(sealed(OURS), ENTRY.format))
    try:
        found = tier.get(ENTRY.key)
    except CorruptEntryError:
        return
    assert found is not None
    assert any(same(found, entry) for entry in sources[:2])


def test_sealed_heads_with_a_header_of_somebody_elses(tmp_path: Path) -> None:
    """The sealed KV of one entry is put under the name of another."""
    other = make_entry(4, heads=3)
    checksums = " ".join(sealed(OURS).heads(other.data.view(torch.uint8).numpy()))
    planted(tmp_path, forged(replace(ENTRY, data=other.data), {"head_checksums": checksums}))
    assert opened(tmp_path).lookup(ENTRY.key, ENTRY.tokens, ENTRY.context).reason is MissReason.CORRUPT


@pytest.mark.parametrize("name", ["k_dim", "dtype", "kind", "head_checksums"])
def test_no_field_of_a_sealed_header_can_be_changed(tmp_path: Path, name: str) -> None:
    """An attacker without the key changes a field to another valid value. With ``head_checksums``, the KV is also
    that of another entry, so the two match."""
    entry = replace(make_entry(3, heads=3), kind="prefix-part")
    mine, theirs = (Encoding(each, sealed(OURS)) for each in (entry, make_entry(4, heads=3)))
    small, kv = map(bytes, mine.value(str(entry.key), 0, 3))
    before, after = {
        "k_dim": ('"k_dim":"3","v_dim":"5"', '"k_dim":"5","v_dim":"3"'),
        "dtype": ('"dtype":"bfloat16"', '"dtype":"float16"'),
        "kind": ('"kind":"prefix-part"', '"kind":"document"'),
        "head_checksums": tuple(" ".join(sealed(OURS).heads(each.kv)) for each in (mine, theirs)),
    }[name]
    changed = small.replace(before.encode(), after.ljust(len(before)).encode())
    assert changed != small
    tier = DiskTier(tmp_path, PLENTY, check=EntryCheck(sealed(OURS)))
    planted(tmp_path, small + kv)
    assert tier.get(entry.key) is not None
    planted(tmp_path, changed + (bytes(theirs.kv) if name == "head_checksums" else kv))
    with pytest.raises(CorruptEntryError, match="checksum of key"):
        tier.get(entry.key)


def test_heads_and_headers_have_keys_of_their_own() -> None:
    sums = []
    for seal in (Seal(), sealed(OURS), sealed(THEIRS)):
        for digest in (seal.for_head(), seal.for_entry()):
            digest.update(memoryview(b"some bytes"))
            sums.append(hexdigest(digest))
    assert len(set(sums)) == 5  # without a store key there is one kind


def test_heads_are_verified_one_by_one() -> None:
    """A remote store has separate heads, and a reader of some heads verifies just those."""
    share = HeadShare.of_rank(0, 1, 3, ENTRY.format.layers)
    entry = replace(ENTRY, key=replace(ENTRY.key, heads=str(share.heads)))

    def received(seal: Seal, forged_head: int | None = None) -> IncomingEntry:
        incoming = IncomingEntry(entry.key, EntryCheck(sealed(OURS), entry.format))
        for index, make in enumerate(values_of(entry, seal)):
            value = bytearray(b"".join(make()))
            if index == forged_head:
                value[-1] ^= 1
            at = 0
            for buffer in incoming.buffers_for(index, len(value)) or ():
                buffer[:] = np.frombuffer(value[at : at + len(buffer)], np.uint8)
                at += len(buffer)
            incoming.received(index)
        return incoming

    good = received(sealed(OURS))
    assert same(
        join(entry.key, [part for part in good.parts.values() if not isinstance(part, Exception)], good.block), entry
    )
    assert [isinstance(part, CorruptEntryError) for part in received(sealed(OURS), 1).parts.values()] == [0, 1, 0]
    for seal in (sealed(THEIRS), Seal()):
        assert all(isinstance(part, CorruptEntryError) for part in received(seal).parts.values())


@pytest.mark.parametrize("per_head", [False, True])
def test_a_shared_pool_is_read_as_a_disk_is(valkey_server: Valkey, per_head: bool) -> None:
    """Values that others wrote there are counted misses, and deleted."""
    share = HeadShare.of_rank(0, 1, 3, ENTRY.format.layers)
    heads = str(share.heads) if per_head else "all"
    entry, other = (replace(each, key=replace(each.key, heads=heads)) for each in (ENTRY, make_entry(9, heads=3)))
    settings = load_config(remote=valkey_server.url, per_head_storage=per_head, remote_deadline_ms=10_000)

    def engine() -> ChunkStorageManager:
        return open_store(settings, share=share, kv_format=ENTRY.format)

    store = engine()
    assert store.put(entry)
    store.close()
    for seal in (Seal(), sealed(THEIRS)):
        foreign = open_remote_tier(valkey_server.url, 10.0, share if per_head else None, EntryCheck(seal))
        foreign.put(other)
        store = engine()
        found = store.lookup(entry.key, entry.tokens, entry.context)
        assert found.entry is not None
        assert (found.tier, same(found.entry, entry)) == ("remote", True)
        assert store.lookup(other.key, other.tokens, other.context).reason is MissReason.CORRUPT
        assert foreign.get(other.key) is None
        store.close()
        foreign.close()


def test_a_value_of_an_impossible_length_is_not_received() -> None:
    incoming = IncomingEntry(ENTRY.key, EntryCheck(Seal(), ENTRY.format))
    assert incoming.buffers_for(0, 512 * 2**20) is None
    assert incoming.buffers_for(0, ENTRY.nbytes - 1) is None
    incoming.received(0)
    assert isinstance(incoming.parts[0], CorruptEntryError)


def cache(root: Path) -> ChunkCache:
    share = HeadShare.of_rank(0, 1, 3, ENTRY.format.layers)
    made: dict[str, Any] = {"sink": (1,), "fingerprint": lambda length: "weights", "share": share}
    return ChunkCache(load_config(disk_path=root), "m", max_positions=None, kv_format=ENTRY.format, **made)


def put(where: ChunkCache) -> ChunkKey:
    key = where.key(ENTRY.tokens, ENTRY.context)
    entry = ChunkKV(key, ENTRY.tokens, ENTRY.context, ENTRY.format, ENTRY.data)
    assert where.store.put(entry)
    where.close()
    return key


def test_engines_with_different_keys_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for secret in (OURS, THEIRS, None):
        if secret is None:
            monkeypatch.delenv(STORE_KEY_VARIABLE)
        else:
            monkeypatch.setenv(STORE_KEY_VARIABLE, secret)
        assert cache(tmp_path).find([ENTRY.tokens], ENTRY.context)[0] == {}
        keys.append(put(cache(tmp_path)))
        assert list(cache(tmp_path).find([ENTRY.tokens], ENTRY.context)[0]) == [ENTRY.tokens]
    assert len({key.fingerprint for key in keys}) == 3
    assert [key.sealed_by is None for key in keys] == [False, False, True]
    assert not any(secret in str(key) for key in keys for secret in (OURS, THEIRS))
    assert len({key.content_hash for key in keys}) == 1


def test_commands_with_and_without_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command harms entries that it cannot check."""
    key = put(cache(tmp_path))
    monkeypatch.setenv(STORE_KEY_VARIABLE, THEIRS)
    put(cache(tmp_path))
    for secret, checked in ((OURS, 1), (THEIRS, 1), (None, 0)):
        if secret is None:
            monkeypatch.delenv(STORE_KEY_VARIABLE)
        else:
            monkeypatch.setenv(STORE_KEY_VARIABLE, secret)
        assert "2 entries" in run_here("store", "ls", "--path", tmp_path).stdout
        done = run_here("store", "verify", "--path", tmp_path)
        assert done.returncode == 0
        assert f"{checked} entries checked, 0 damaged" in done.stdout
        assert f"{2 - checked} entries have another store key and were not checked" in done.stdout
        assert OURS not in done.stdout + done.stderr
    # Damage is still found.
    monkeypatch.setenv(STORE_KEY_VARIABLE, OURS)
    path = tmp_path / entry_path(key)
    content = bytearray(path.read_bytes())
    content[-1 - random.randrange(ENTRY.nbytes)] ^= 1
    path.write_bytes(content)
    assert run_here("store", "verify", "--path", tmp_path).returncode == 1
    assert not path.exists()


def test_pinned_memory_counts_as_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch allocates pinned memory in powers of two. Otherwise a budget might be exceeded twofold."""
    from kvmosaic.store import HostTier
    from kvmosaic.store.tiers.host import taken_bytes

    entries = [make_entry(number, tokens=33) for number in range(8)]
    one = entries[0].nbytes
    assert taken_bytes(entries[0].data) == one
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    taken = taken_bytes(entries[0].data)
    assert taken == 1 << (one - 1).bit_length() > one
    assert taken_bytes(torch.empty(4096, dtype=torch.uint8)) == 4096
    assert taken_bytes(torch.empty(0, dtype=torch.uint8)) == 0
    store = ChunkStorageManager([HostTier(4 * taken)])
    for entry in entries:
        assert store.put(entry)
    assert store.held() == {"host": (4, 4 * taken)}
    assert sum(info.nbytes for info in store.scan()) == 4 * taken


@pytest.mark.parametrize("other", [{"k_dim": 5, "v_dim": 3}, {"dtype": torch.float16}, {"layers": 1}, {"k_dim": 4}])
def test_a_single_head_of_another_format_is_not_used(other: dict[str, Any]) -> None:
    """All heads of an entry have it, so they would fit together."""
    wrong = make_entry(3, heads=3, **other)
    share = HeadShare.of_rank(0, 1, 3, ENTRY.format.layers)
    key = replace(ENTRY.key, heads=str(share.heads))
    incoming = IncomingEntry(key, EntryCheck(sealed(OURS), ENTRY.format))
    encoding = Encoding(wrong, sealed(OURS))
    for index, name in enumerate(part_keys(key)):
        value = np.frombuffer(b"".join(encoding.value(name, index, index + 1)), np.uint8)
        at = 0
        for buffer in incoming.buffers_for(index, len(value)) or ():
            buffer[:] = value[at : at + len(buffer)]
            at += len(buffer)
        incoming.received(index)
    assert all(isinstance(part, CorruptEntryError) for part in incoming.parts.values())
    assert len(incoming.parts) == 3
