"""Entries that are stored some layers at a time, written at one pipeline-parallel size and read at another."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from head_helpers import close, find, names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_servers import Valkey
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.heads import HeadRange, HeadShare
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.window import WHOLE, WindowTails
from kvmosaic.store import ChunkStorageManager, MissReason, open_store
from kvmosaic.store.remote.keys import names_of, part_keys
from kvmosaic.store.tiers.remote import RemoteTier, open_remote_tier

HEADS, LAYERS = 4, 12
SIZES = (1, 2, 3, 6)
"""Numbers of pipeline stages."""
LEAST = 2
"""Number of layers of the shortest stage, which all engines store together."""
on_valkey = pytest.mark.parametrize("server", ["valkey"], indirect=True)


def stages(count: int, ranks: int = 1, together: int | None = LEAST) -> list[HeadShare]:
    """The shares of all ranks of an engine, from its numbers of stages and of tensor-parallel ranks per stage."""
    per_stage = LAYERS // count
    return [
        HeadShare.of_rank(rank, ranks, HEADS, per_stage, stage * per_stage).cut(together)
        for stage, rank in product(range(count), range(ranks))
    ]


def windowed_entry(number: int, tails: WindowTails, tokens: int) -> ChunkKV:
    """An entry of the whole model."""
    plain = make_entry(number, heads=HEADS, layers=LAYERS, tokens=tokens)
    kv_format = KVFormat(LAYERS, HEADS, 3, 5, plain.format.dtype, tails)
    return replace(plain, format=kv_format, data=plain.data[:, : kv_format.num_elements(tokens)].contiguous())


def of_share(entry: ChunkKV, own: HeadShare) -> ChunkKV:
    """A rank's part of an entry of the whole model."""
    heads = own.heads
    mine = entry.of_layers(heads.first_layer, heads.last_layer)
    return replace(
        mine,
        key=replace(entry.key, heads=str(heads)),
        format=replace(mine.format, heads=heads.count),
        data=mine.data[heads.first : heads.last + 1].contiguous(),
    )


def opened(url: str, own: HeadShare, entry: ChunkKV) -> ChunkStorageManager:
    config = load_config(remote=url, per_head_storage=True, remote_deadline_ms=10_000)
    return open_store(config, share=own, kv_format=of_share(entry, own).format)


@on_valkey
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(SIZES),
    st.sampled_from(SIZES),
    st.sampled_from([1, 2]),
    st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_bytes_written_at_one_size_are_read_at_another(
    tier: RemoteTier, server: Valkey, writers: int, readers: int, ranks: int, windowed: Any, tail: int, tokens: int
) -> None:
    tier.delete_all([info.key for info in tier.scan()])
    entry = windowed_entry(1, WindowTails(tuple(sorted(windowed)), tail) if windowed else WHOLE, tokens)
    for own in stages(writers, 3 - ranks):
        store = opened(server.url, own, entry)
        assert store.put(of_share(entry, own))
        close([store])
        assert store.get_stats()["write_errors"] == 0
    assert len(names(tier)) == HEADS * LAYERS // LEAST
    for own in stages(readers, ranks):
        store = opened(server.url, own, entry)
        mine = of_share(entry, own)
        assert store.take_changes()[mine.key] == "remote"
        found = find(store, mine).entry
        assert found is not None
        assert same(found, mine)
        close([store])


@on_valkey
def test_a_stage_finds_what_others_store_in_the_same_layers(tier: RemoteTier, server: Valkey) -> None:
    """By default, each of two stages stores all its layers together. An engine of one stage can store them in the
    same parts."""
    entry = windowed_entry(1, WHOLE, 5)
    two, [one] = stages(2, together=None), stages(1, together=6)
    assert [str(own.heads) for own in (*two, one)] == ["0-3of4L0-5", "0-3of4L6-11", "0-3of4L0-11by6"]
    assert str(stages(2, together=6)[1].heads) == "0-3of4L6-11"
    store = opened(server.url, one, entry)
    for own in two:
        assert find(store, of_share(entry, one)).entry is None  # the other stage's layers are missing
        each = opened(server.url, own, entry)
        assert each.put(of_share(entry, own))
        close([each])
    close([store])
    store = opened(server.url, one, entry)
    found = find(store, of_share(entry, one)).entry
    assert found is not None
    assert same(found, of_share(entry, one))
    close([store])


@on_valkey
def test_a_listing_has_every_value_once(tier: RemoteTier, server: Valkey) -> None:
    complete, partial = windowed_entry(1, WHOLE, 4), windowed_entry(2, WHOLE, 4)
    [one] = stages(1)
    store = opened(server.url, one, complete)
    for entry in (complete, partial):
        assert store.put(of_share(entry, one))
    close([store])
    lost = names_of(of_share(partial, one).key)[3]
    tier._client.delete([lost])
    for own in (*stages(1), *stages(3), *stages(2, 2)):
        store = opened(server.url, own, complete)
        listed = {info.key for info in store.scan()}
        assert of_share(complete, own).key in listed
        assert (of_share(partial, own).key in listed) == (lost not in names_of(of_share(partial, own).key))
        assert sorted(name for key in listed for name in names_of(key)) == names(tier)
        close([store])


@on_valkey
def test_layers_of_different_entries_are_no_entry(tier: RemoteTier, server: Valkey) -> None:
    [one] = stages(1)
    entry, other = windowed_entry(1, WHOLE, 4), windowed_entry(1, WindowTails((0, 1), 2), 4)
    store = opened(server.url, one, entry)
    assert store.put(of_share(entry, one))
    close([store])
    # The first two layers of another format, under the name of this one.
    lying = replace(of_share(other, one), key=of_share(entry, one).key)
    place = open_remote_tier(server.url, 10)
    place.put(lying)
    place.close()
    fresh = opened(server.url, one, entry)
    assert find(fresh, of_share(entry, one)).reason is MissReason.CORRUPT
    close([fresh])


def test_where_layers_are_cut() -> None:
    heads = HeadRange(0, 1, 2, 4, 9)
    assert heads.cut(None) == heads
    assert HeadRange(0, 1, 2, 6, 9).cut(6) == HeadRange(0, 1, 2, 6, 9)
    assert heads.cut(4).layer_spans == [(4, 7), (8, 9)]
    assert [str(part) for part in heads.cut(4).parts()] == [
        "0-0of2L4-7",
        "0-0of2L8-9",
        "1-1of2L4-7",
        "1-1of2L8-9",
    ]
    with pytest.raises(ConfigError, match="remote_layers=3: a pipeline stage begins at layer 4"):
        heads.cut(3)
    with pytest.raises(ConfigError, match="needs per_head_storage"):
        load_config(remote_layers=4)


@pytest.mark.parametrize(
    "text",
    ["0-1of2L0-5by0", "0-1of2L0-5by6", "0-1of2L0-5by03", "0-1of2by3", "0-1of2L0-5by", "0-99998of99999L0-99998by1"],
)
def test_names_that_are_no_parts(text: str) -> None:
    assert HeadRange.parse(text) is None


def test_names_of_parts_are_read_back() -> None:
    key = ChunkKey(b"0" * 16, 7, "m", "f", "t", "0-1of2L0-5by2")
    assert ChunkKey.parse(str(key)) == key
    assert HeadRange.parse(key.heads) == HeadRange(0, 1, 2, 0, 5, 2)
    assert len(names_of(key)) == len(part_keys(key)) == 6
