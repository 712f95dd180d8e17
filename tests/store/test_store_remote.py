"""Remote tiers, on real servers: several processes, calls for many keys, and protection against foreign values."""

import logging
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_servers import DEADLINE_S, Mooncake, Valkey
from safetensors.torch import load
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import ChunkStorageManager, CorruptEntryError, HostTier, LookupResult, MissReason, open_store
from kvmosaic.store.codec import decode, encode
from kvmosaic.store.remote.keys import group_of, names_of, parse_remote_key, remote_key
from kvmosaic.store.remote.mooncake import MooncakeClient
from kvmosaic.store.seal import ANY_ENTRY, Seal
from kvmosaic.store.tiers import remote as remote_module
from kvmosaic.store.tiers.remote import RemoteTier, open_remote_tier

pytestmark = pytest.mark.usefixtures("one_mooncake_client")
ONE = make_entry(0).nbytes
PLENTY = 2**30
powers = st.sampled_from([1, 2, 4, 8, 16, 64])
texts = st.text(st.characters(codec="utf-8"), max_size=40)
heads = st.builds(lambda rank, heads: HeadShare.of_rank(rank, 8, heads, 1).together, st.integers(0, 7), powers)
heads = st.just("all") | heads
keys = st.builds(ChunkKey, st.binary(min_size=16, max_size=16), st.integers(1, 10**6), texts, texts, texts, heads)


def find(store: ChunkStorageManager, entry: ChunkKV) -> LookupResult:
    return store.lookup(entry.key, entry.tokens, entry.context)


def over(tier: RemoteTier, host: int = PLENTY) -> ChunkStorageManager:
    """A store whose host tier is empty."""
    return ChunkStorageManager([HostTier(host), tier])


def value_of(entry: ChunkKV) -> bytearray:
    return bytearray(b"".join(encode(entry, Seal())))


def plant(tier: RemoteTier, key: ChunkKey, value: bytes | bytearray) -> None:
    """Store any bytes under the key of an entry."""
    tier.delete(key)
    [refusal] = tier._client.put([remote_key(key)], [lambda: [memoryview(bytes(value))]])
    assert refusal is None


@given(keys, keys)
def test_keys_are_told_apart_and_read_back(key: ChunkKey, other: ChunkKey) -> None:
    name = remote_key(key)
    assert parse_remote_key(name) == key
    assert name.isascii()
    assert (remote_key(other) == name) == (other == key)
    assert group_of(name) == group_of(remote_key(replace(key, heads="0-1of64")))
    assert (group_of(remote_key(other)) == group_of(name)) == (replace(other, heads=key.heads) == key)


@pytest.mark.parametrize("name", ["", "kvmosaic-1:", "kvmosaic-1:a@b@fmt:c@zz@1@L:all@head:all", "other"])
def test_names_of_others_are_no_keys(name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of any kind
        parse_remote_key(name)


def test_a_value_is_a_safetensors_file_that_keeps_its_memory() -> None:
    entry = make_entry(1, tokens=7, heads=4)
    value = np.frombuffer(value_of(entry), np.uint8)
    tensors = load(value.tobytes())
    assert torch.equal(tensors["kv"].view(torch.uint8), entry.data.view(torch.uint8))
    assert tuple(tensors["tokens"].tolist()) == entry.tokens
    decoded = decode([value], str(entry.key), ANY_ENTRY)
    read = decoded.entry(entry.key, decoded.kv, entry.format)
    assert same(read, entry)
    offset = read.data.data_ptr() - value.ctypes.data
    assert 0 < offset < len(value)
    assert offset % 64 == 0


def test_a_new_process_finds_what_another_stored(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    entries = [make_entry(number) for number in range(20)]
    with_settings = load_config(remote=server.url, host_memory=3 * ONE, remote_deadline_ms=10_000)
    store = open_store(with_settings)
    assert all(store.put(entry) for entry in entries)
    store.close()
    store = open_store(with_settings)
    assert {info.key for info in store.scan()} == {entry.key for entry in entries}
    for entry in entries:
        found, name, _ = find(store, entry)
        assert found is not None
        assert same(found, entry)
        assert name == "remote"
    assert find(store, entries[-1]).tier == "host"
    stats = store.get_stats()
    assert stats["hits_by_tier"] == {"host": 1, "remote": 20}
    store.close()


def test_what_another_process_stores_later_is_found_and_known(tier: RemoteTier) -> None:
    store, other = over(tier), over(tier)
    store.take_changes()
    for number in (1, 2):
        other.put(make_entry(number))
    other.flush()
    assert find(store, make_entry(1)).tier == "remote"
    # It is also computed here before it is looked up. Now it is near, and the remote copy stays.
    assert store.put(make_entry(2, version=1))
    store.flush()
    assert store.take_changes() == {make_entry(1).key: "host", make_entry(2).key: "host"}
    found = tier.get(make_entry(2).key)
    assert found is not None
    assert same(found, make_entry(2))


def test_absent_keys_are_asked_for_in_one_go(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    store, entries = over(tier), [make_entry(number) for number in range(50)]
    tier.put(entries[0])
    store.put(entries[1])
    store.flush()
    calls: list[str] = []
    for name in ("exists", "sizes", "get_into"):
        method = getattr(tier._client, name)
        monkeypatch.setattr(
            tier._client, name, lambda *given, name=name, method=method: calls.append(name) or method(*given)
        )
    absent = store.absent(entry.key for entry in entries)
    results = [store.lookup(entry.key, entry.tokens, entry.context, absent=absent) for entry in entries]
    assert [result.tier for result in results[:2]] == ["remote", "host"]
    assert {result.reason for result in results[2:]} == {MissReason.NEW}
    assert [call for call in calls if call == "get_into"] == ["get_into"]
    assert len(calls) <= 4  # Mooncake's client has to ask for the size first


@given(data=st.data())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_entries_fetched_together_are_what_each_read_alone_is(tier: RemoteTier, data: st.DataObject) -> None:
    """Entries have several formats and lengths. Some are missing, some are damaged, and calls read different numbers
    of them."""
    chance = data.draw(st.randoms(use_true_random=False))
    entries = [make_entry(number, tokens=chance.randint(1, 9), heads=chance.choice([1, 3])) for number in range(12)]
    states = [chance.choice(["there", "there", "missing", "damaged"]) for _ in entries]
    tier.delete_all([entry.key for entry in entries])
    for entry, state in zip(entries, states, strict=True):
        value = value_of(entry)
        value[-1] ^= state == "damaged"
        if state != "missing":
            plant(tier, entry.key, value)
    store = over(tier)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier._client, "read_at_once_bytes", chance.choice([0, 300, 10**6]), raising=False)
        store.fetch([entry.key for entry in entries] * 2)
    for entry, state in zip(entries, states, strict=True):
        found = store._stack.tiers[0].get(entry.key)
        assert (found is not None) == (state == "there")
        assert found is None or same(found, entry)
        result = find(store, entry)
        reason = {"there": None, "missing": MissReason.NEW, "damaged": MissReason.CORRUPT}[state]
        assert (result.tier, result.reason) == ("remote" if state == "there" else None, reason)


def test_mooncake_reads_several_entries_by_one_call(
    mooncake_server: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_remote_tier(mooncake_server.url, 5.0)
    entries = [make_entry(number) for number in range(20)]
    for entry in entries:
        tier.put(entry)
    counts: list[int] = []
    get_into = tier._client.get_into
    monkeypatch.setattr(
        tier._client, "get_into", lambda keys, incoming: counts.append(len(keys)) or get_into(keys, incoming)
    )
    store = over(tier)
    store.fetch([entry.key for entry in entries])
    assert counts == [1, 19]  # the size of entries of this format is known from the first one
    tier.delete_all([entry.key for entry in entries])
    store.close()


def test_clear_is_for_all(tier: RemoteTier) -> None:
    store = over(tier)
    for number in range(10):
        store.put(make_entry(number, tenant="a" if number % 2 else "b"))
    store.clear(lambda key: key.tenant == "a")
    store.flush()
    assert {info.key.tenant for info in tier.scan()} == {"b"}
    assert [find(store, make_entry(n, tenant="a" if n % 2 else "b")).entry is None for n in range(4)] == [
        False,
        True,
        False,
        True,
    ]


def test_an_evicted_entry_is_sent_again_only_if_the_store_never_had_it(tier: RemoteTier) -> None:
    store = over(tier, host=2 * ONE)
    for number in range(6):
        store.put(make_entry(number))
        store.flush()
    assert store.get_stats()["demotions"] == 0
    assert all(find(store, make_entry(number)).entry is not None for number in range(6))


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "empty header", "other key", "foreign"])
def test_a_damaged_value_is_a_counted_miss_and_replaced(tier: RemoteTier, damage: str) -> None:
    entry = make_entry(5, heads=3)
    value = value_of(entry)
    if damage == "flipped":
        value[-1] ^= 1
    elif damage == "shorter":
        del value[-1]
    elif damage == "longer":
        value.append(0)
    elif damage == "empty header":
        value[:] = (2).to_bytes(8, "little") + b"{}"
    elif damage == "other key":
        value = value_of(make_entry(6, heads=3))
    else:
        value[:] = b"hello"
    plant(tier, entry.key, value)
    store = over(tier)
    assert find(store, entry) == (None, None, MissReason.CORRUPT)
    stats = store.get_stats()
    assert (stats["misses_by_reason"]["corrupt"], stats["corrupt_set_aside"]) == (1, 1)
    assert tier.size(entry.key) is None
    assert store.put(entry)
    store.flush()
    found = tier.get(entry.key)
    assert found is not None
    assert same(found, entry)


def test_every_byte_is_covered(valkey_server: Valkey) -> None:
    tier = open_remote_tier(valkey_server.url, 5.0)
    entry = make_entry(5, heads=3)
    value = value_of(entry)
    start = 8 + int.from_bytes(value[:8], "little")
    for offset in range(start, len(value)):
        value[offset] ^= 1
        plant(tier, entry.key, value)
        value[offset] ^= 1
        with pytest.raises(CorruptEntryError):
            tier.get(entry.key)
    tier.close()


def test_other_formats_models_and_tenants_find_nothing(tier: RemoteTier) -> None:
    mine = make_entry(1, tenant="a")
    store = over(tier)
    store.put(mine)
    store.flush()
    for other in (
        replace(mine.key, fingerprint="other-dtype-or-rope"),
        replace(mine.key, model="other"),
        replace(mine.key, tenant="b"),
        replace(mine.key, heads="0-0of2"),
    ):
        assert over(tier).lookup(other, mine.tokens, mine.context).reason is MissReason.NEW
        # A value that is copied to another key still says which key it belongs to.
        plant(tier, other, value_of(mine))
        assert over(tier).lookup(other, mine.tokens, mine.context).reason is MissReason.CORRUPT


def test_two_tenants_with_the_same_document(tier: RemoteTier) -> None:
    store = over(tier)
    a, b = make_entry(1, tenant="a"), make_entry(1, tenant="b", version=1)
    store.put(a)
    store.flush()
    assert find(over(tier), b).entry is None
    store.put(b)
    store.flush()
    for entry in (a, b):
        found = find(over(tier), entry).entry
        assert found is not None
        assert same(found, entry)


def test_same_key_other_tokens(tier: RemoteTier) -> None:
    tier.put(make_entry(1))
    store = over(tier)
    assert store.lookup(make_entry(1).key, (9, 9, 9, 9), (1,)).reason is MissReason.COLLISION


def test_keys_that_are_no_values_or_not_ours(valkey_server: Valkey) -> None:
    """There is a list under the name of an entry, and keys of other programs."""
    tier = open_remote_tier(valkey_server.url, 1.0)
    client, entry = tier._client, make_entry(1)
    client._ask([("DEL", remote_key(entry.key)), ("RPUSH", remote_key(entry.key), "x")])  # type: ignore[attr-defined]
    client._ask([("SET", "kvmosaic-1:not ours", "x"), ("SET", "something", "x")])  # type: ignore[attr-defined]
    assert not list(tier.scan())
    store = over(tier)
    assert find(store, entry).entry is None
    assert store.put(entry)
    store.flush()
    assert find(over(tier), entry).tier == "remote"
    tier.delete(entry.key)
    client._ask([("DEL", "kvmosaic-1:not ours", "something")])  # type: ignore[attr-defined]
    tier.close()


def test_a_full_valkey_refuses_and_is_not_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Valkey(tmp_path)
    tier = open_remote_tier(server.url, 1.0)
    tier._client._ask([("CONFIG", "SET", "maxmemory", "3000000")])  # type: ignore[attr-defined]
    store = over(tier)
    with caplog.at_level(logging.WARNING):
        for number in range(6):
            assert store.put(make_entry(number, tokens=20_000))
        store.flush()
    assert store.get_stats()["write_errors"] > 0
    assert len(caplog.records) == 1
    assert "OOM" in caplog.text
    assert len(list(tier.scan())) == 6 - store.get_stats()["write_errors"]
    server.kill()


def test_a_value_that_valkey_cannot_hold_is_not_sent(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier._client, "max_value_bytes", ONE)
    store = over(tier)
    assert store.put(make_entry(1))
    store.flush()
    assert store.get_stats()["write_errors"] == 1
    assert find(store, make_entry(1)).tier == "host"
    assert not list(tier.scan())


def test_2048_keys_are_looked_up_in_one_or_two_calls(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """``kvmosaic bench store`` measures how long they take."""
    wanted = [make_entry(number).key for number in range(2048)]
    for number in range(0, 2048, 64):
        tier.put(make_entry(number))
    calls: list[int] = []
    call = "_exists" if isinstance(tier._client, MooncakeClient) else "_ask"
    asked = getattr(tier._client, call)
    monkeypatch.setattr(tier._client, call, lambda keys: (calls.append(len(keys)), asked(keys))[1])
    assert sum(tier.holds(wanted)) == 32
    assert sum(calls) == 2048
    assert len(calls) <= 2


def test_a_listing_remembers_only_so_many_names(valkey_server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody planted many, all well-formed; and one that is longer than any of ours."""
    tier = open_remote_tier(valkey_server.url, DEADLINE_S)
    tier.delete_all([info.key for info in tier.scan()])
    keys = [replace(make_entry(1).key, content_hash=number.to_bytes(16, "big")) for number in range(30_000)]
    long = replace(keys[0], model="m" * 5000)
    names = [name for key in (*keys, long) for name in names_of(key)]
    for start in range(0, len(names), 1000):
        page = names[start : start + 1000]
        tier._client.put(page, [lambda: [memoryview(b"x")]] * len(page))
    monkeypatch.setattr(remote_module, "MAX_SEEN", 2000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    listed = bytearray(len(keys))
    for info in tier.scan():
        assert info.key.model != long.model
        listed[int.from_bytes(info.key.content_hash, "big")] = 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(listed)
    assert peak - before < 2 * 2**20
    tier._client.delete(names)
    tier.close()
