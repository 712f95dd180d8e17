"""Entries that are stored head by head, written by engines of one tensor-parallel size and read by those of
another."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from head_helpers import (
    HEADS,
    LAYERS,
    change,
    fill,
    find,
    head_name,
    model_entry,
    names,
    of_share,
    opened,
    plant,
    results,
    share,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_servers import Mooncake, Valkey
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import MissReason, open_store
from kvmosaic.store.codec import Encoding
from kvmosaic.store.remote.heads import values_of
from kvmosaic.store.remote.keys import names_of, part_keys, remote_key
from kvmosaic.store.seal import Seal
from kvmosaic.store.tiers.remote import RemoteTier, open_remote_tier
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("one_mooncake_client")
SIZES = (1, 2, 4, 8, 16)
PAIRS = list(product(SIZES, SIZES))
FEW_PAIRS = [(writers, readers) for writers, readers in PAIRS if writers * readers <= 16]
"""Fewer cases for Mooncake, because there is a client for each rank, and clients connect and disconnect slowly."""
on_valkey = pytest.mark.parametrize("server", ["valkey"], indirect=True)
on_mooncake = pytest.mark.parametrize("server", ["mooncake"], indirect=True)
same_tier = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}
shapes = {
    "tokens": st.integers(1, 40),
    "dims": st.tuples(st.integers(1, 9), st.integers(1, 9)),
    "dtype": st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    "number": st.integers(1, 10**5),
}


@on_valkey
@settings(max_examples=30, **same_tier)
@given(ranks=st.sampled_from(PAIRS), **shapes)
def test_bytes_written_at_one_size_are_read_at_another(tier: RemoteTier, server: Valkey, **drawn: Any) -> None:
    write_and_read(tier, server, **drawn)


@on_mooncake
@settings(max_examples=examples(30, 4), **same_tier)
@given(ranks=st.sampled_from(FEW_PAIRS), **shapes)
def test_and_so_are_those_in_mooncake(tier: RemoteTier, server: Mooncake, **drawn: Any) -> None:
    write_and_read(tier, server, **drawn)


def write_and_read(
    tier: RemoteTier,
    server: Valkey | Mooncake,
    ranks: tuple[int, int],
    tokens: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    number: int,
) -> None:
    writers, readers = ranks
    tier.delete_all([info.key for info in tier.scan()])
    entry = model_entry(number, tokens=tokens, k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    fill(server.url, writers, [entry])
    assert len(names(tier)) == HEADS
    assert all(result.entry is not None for result in results(server.url, readers, entry))


@pytest.mark.parametrize("readers", SIZES)
@pytest.mark.parametrize("writers", SIZES)
def test_all_pairs_of_sizes(valkey_server: Valkey, writers: int, readers: int) -> None:
    tier = open_remote_tier(valkey_server.url, 10)
    tier.delete_all([info.key for info in tier.scan()])
    entries = [model_entry(number) for number in range(3)]
    fill(valkey_server.url, writers, entries)
    assert len(names(tier)) == HEADS * len(entries)
    for entry in entries:
        assert all(result.entry is not None for result in results(valkey_server.url, readers, entry))
    tier.delete_all([info.key for info in tier.scan()])
    tier.close()


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (4, 1)])
def test_a_latent_is_one_head_on_every_rank(
    tier: RemoteTier, server: Valkey | Mooncake, writers: int, readers: int
) -> None:
    entry = model_entry(1, heads=1, k_dim=16, v_dim=4)
    fill(server.url, writers, [entry])
    assert len(names(tier)) == 1
    assert all(result.entry is not None for result in results(server.url, readers, entry))


def test_one_of_several_holders_writes_a_head(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    """The ranks that do not write do not count the entry as missing."""
    entry, wrote = model_entry(1), []
    for rank in (0, 1):
        own = share(rank, 16)
        mine = of_share(entry, own)
        store = opened(server.url, own)
        assert store.put(mine)
        store.flush()
        assert store._stack.index.holds(mine.key, "remote")
        wrote.append(names(tier) == names_of(mine.key))
        store.clear()
        store.close()
    assert sorted(wrote) == [False, True]


@pytest.mark.parametrize("damage", ["missing", "flipped", "shorter", "longer", "other head", "other entry"])
def test_one_bad_head_is_a_counted_miss_for_those_who_need_it(
    tier: RemoteTier, server: Valkey | Mooncake, damage: str
) -> None:
    entry, bad = model_entry(1), 5
    fill(server.url, 2, [entry])
    name = head_name(entry, bad)
    if damage == "missing":
        tier._client.delete([name])
    elif damage == "flipped":
        change(tier, name, lambda value: value.__setitem__(-1, value[-1] ^ 1))
    elif damage == "shorter":
        change(tier, name, lambda value: value.__delitem__(-1))
    elif damage == "longer":
        change(tier, name, lambda value: value.append(0))
    else:
        other = values_of(of_share(entry if damage == "other head" else model_entry(2), share(0, 1)), Seal())
        plant(tier, name, b"".join(other[4 if damage == "other head" else bad]()))
    reason = MissReason.NEW if damage == "missing" else MissReason.CORRUPT
    own = share(1, 2)
    store = opened(server.url, own)
    mine = of_share(entry, own)
    assert find(store, mine) == (None, None, reason)
    stats = store.get_stats()
    assert stats["misses_by_reason"][reason.value] == 1
    assert stats["corrupt_set_aside"] == (reason is MissReason.CORRUPT)
    assert name not in names(tier)
    assert len(names(tier)) == HEADS - 1
    # Ranks that do not need it do not notice. Ranks that need it find neither the entry nor a trace of it.
    assert [result.entry is not None for result in results(server.url, 4, entry)] == [True, True, False, True]
    # Once the ranks that lacked it have filled it again, it is complete for all.
    assert store.put(mine)
    store.close()
    assert all(result.entry is not None for result in results(server.url, 1, entry))


def test_sound_heads_of_different_entries_are_no_entry(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    """This could result from a hash collision, or from two engines that wrongly assume the same format."""
    for other in (
        model_entry(1, dtype=torch.float32),
        model_entry(1, k_dim=5, v_dim=3),
        replace(model_entry(1), tokens=model_entry(2).tokens),
        replace(model_entry(1), context=(2,)),
    ):
        entry = model_entry(1)
        fill(server.url, 1, [entry])
        plant(tier, head_name(entry, 3), b"".join(values_of(of_share(other, share(0, 1)), Seal())[3]()))
        assert [result.reason for result in results(server.url, 1, entry)] == [MissReason.CORRUPT]
        assert not names(tier)
    layers = make_entry(1, heads=HEADS, layers=LAYERS + 1)
    own = of_share(model_entry(1), share(0, 1)).key
    for head, key in enumerate(part_keys(own)):
        plant(tier, head_name(model_entry(1), head), b"".join(Encoding(layers, Seal()).value(key, head, head + 1)))
    assert [result.reason for result in results(server.url, 1, model_entry(1))] == [MissReason.CORRUPT]


def test_other_dtypes_models_tenants_and_layers_find_nothing(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    entry = model_entry(1, tenant="a")
    fill(server.url, 2, [entry])
    store = opened(server.url, share(0, 1))
    mine = of_share(entry, share(0, 1)).key
    for other in (
        replace(mine, fingerprint="other-dtype-or-rope"),
        replace(mine, model="other"),
        replace(mine, tenant="b"),
        replace(mine, heads="0-7of8L0-3"),
        replace(mine, heads="0-7of16L0-2"),
        replace(mine, heads="all"),
    ):
        assert store.lookup(other, entry.tokens, entry.context).reason is MissReason.NEW
        # Values that are copied to such names still say which key they belong to.
        for name, value in zip(names_of(other), values_of(of_share(entry, share(0, 1)), Seal()), strict=False):
            plant(tier, name, b"".join(value()))
        fresh = opened(server.url, share(0, 1))
        assert fresh.lookup(other, entry.tokens, entry.context).reason is MissReason.CORRUPT
        fresh.close()
    assert store.lookup(mine, (9, 9, 9, 9), entry.context).reason is MissReason.COLLISION
    store.close()


def test_many_chunks_and_heads_take_few_calls(
    tier: RemoteTier, server: Valkey | Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for name in ("exists", "sizes", "get_into", "put"):
        method = getattr(type(tier._client), name)
        monkeypatch.setattr(
            type(tier._client), name, lambda *given, name=name, method=method: made.append(name) or method(*given)
        )
    entries = [of_share(model_entry(number), share(0, 2)) for number in range(40)]
    writer = opened(server.url, share(0, 2))
    for entry in entries[:2]:
        writer.put(entry)
    writer.close()
    assert made.count("put") == 2
    tier._client.delete([names_of(entries[1].key)[2]])
    store = opened(server.url, share(0, 2))
    made.clear()
    absent = store.absent(entry.key for entry in entries)
    assert made == ["exists"]
    assert {key for _, key in absent} == {entry.key for entry in entries[1:]}
    found = [store.lookup(entry.key, entry.tokens, entry.context, absent=absent) for entry in entries]
    assert [result.entry is not None for result in found] == [True] + 39 * [False]
    assert made.count("get_into") == 1
    assert len(made) <= 4  # Mooncake's client has to ask for the sizes first
    store.close()


@on_valkey
@settings(max_examples=10, **same_tier)
@given(data=st.data())
def test_entries_fetched_together_lose_only_what_is_damaged(
    tier: RemoteTier, server: Valkey, data: st.DataObject
) -> None:
    fetch_with_damage(tier, server, data)


@on_mooncake
@settings(max_examples=examples(10, 4), **same_tier)
@given(data=st.data())
def test_and_so_do_those_from_mooncake(tier: RemoteTier, server: Mooncake, data: st.DataObject) -> None:
    fetch_with_damage(tier, server, data)


def fetch_with_damage(tier: RemoteTier, server: Valkey | Mooncake, data: st.DataObject) -> None:
    entries = [of_share(model_entry(number), share(0, 2)) for number in range(6)]
    writer = opened(server.url, share(0, 2))
    for entry in entries:
        writer.put(entry)
    writer.close()
    states = data.draw(st.lists(st.sampled_from(["whole", "whole", "damaged", "gone"]), min_size=6, max_size=6))
    reader = opened(server.url, share(0, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tier._client), "read_at_once_bytes", data.draw(st.sampled_from([0, 2000, 10**6])))
        reader.fetch([entries[0].key])  # after which the format is known
        reader._stack.tiers[0].delete(entries[0].key)
        ruined = []
        for entry, state in zip(entries, states, strict=True):
            name = data.draw(st.sampled_from(names_of(entry.key)))
            if state == "damaged":
                change(tier, name, lambda value: value.__setitem__(-1, value[-1] ^ 1))
            elif state == "gone":
                tier._client.delete([name])
            ruined += [] if state == "whole" else [name]
        reader.fetch([entry.key for entry in entries])
    for entry, state in zip(entries, states, strict=True):
        found = reader._stack.tiers[0].get(entry.key)
        assert (found is not None) == (state == "whole")
        assert found is None or same(found, entry)
    assert set(names(tier)) == {name for entry in entries for name in names_of(entry.key)} - set(ruined)
    reader.clear()
    reader.close()


def test_a_start_lists_what_each_rank_can_read(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    """All other entries, stored together or head by head, are listed once."""
    complete, partial_, whole = model_entry(1), model_entry(2), make_entry(3)
    fill(server.url, 1, [complete, partial_])
    tier._client.delete([head_name(partial_, 6)])
    tier.put(whole)
    for rank, ranks in ((0, 1), (0, 2), (1, 2), (5, 16)):
        own = share(rank, ranks)
        store = opened(server.url, own)
        listed = {info.key for info in store.scan()}
        assert (of_share(complete, own).key in listed, of_share(partial_, own).key in listed) == (
            True,
            own.heads.last < 6 or own.heads.first > 6,
        )
        assert whole.key in listed
        assert store.take_changes()[of_share(complete, own).key] == "remote"
        every = [name for key in listed for name in names_of(key)]
        assert sorted(every) == names(tier)
        store.close()
    runs = {(info.key.content_hash, info.key.heads) for info in tier.scan()}
    assert runs == {
        (complete.key.content_hash, "0-7of8L0-2"),
        (partial_.key.content_hash, "0-5of8L0-2"),
        (partial_.key.content_hash, "7-7of8L0-2"),
        (whole.key.content_hash, "all"),
    }


def test_clear_drops_every_head(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    fill(server.url, 4, [model_entry(number, tenant="a" if number % 2 else "b") for number in range(4)])
    store = opened(server.url, share(1, 2))
    store.clear(lambda key: key.tenant == "a")
    store.flush()
    assert {info.key.tenant for info in tier.scan()} == {"b"}
    assert len(names(tier)) == 2 * HEADS
    store.close()


def test_without_the_setting_nothing_changes(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    entry = model_entry(1)
    store = open_store(load_config(remote=server.url, remote_deadline_ms=10_000), share=share(0, 1))
    store.put(entry)
    store.close()
    assert names(tier) == [remote_key(entry.key)]
    assert [info.key for info in tier.scan()] == [entry.key]


def test_a_full_store_keeps_no_part_of_an_entry(tmp_path: Any) -> None:
    server = Valkey(tmp_path)
    tier = open_remote_tier(server.url, 5)
    tier._client._ask([("CONFIG", "SET", "maxmemory", "6000000")])  # type: ignore[attr-defined]
    store = opened(server.url, share(0, 1))
    for number in range(6):
        store.put(of_share(model_entry(number, tokens=4_000), share(0, 1)))
    store.flush()
    errors = store.get_stats()["write_errors"]
    assert 0 < errors < 6
    assert len(names(tier)) == (6 - errors) * HEADS
    store.close()
    tier.close()
    server.kill()


def test_what_does_not_fit_its_key_is_refused(tier: RemoteTier) -> None:
    entry = of_share(model_entry(1), share(0, 2))
    with pytest.raises(OSError, match="4 heads and 3 layers does not match its key, 0-7of8L0-2"):
        tier.put(replace(entry, key=ChunkKey(**{**vars(entry.key), "heads": "0-7of8L0-2"})))
