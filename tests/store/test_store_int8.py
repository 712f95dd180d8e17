"""Entries in 8 bits in every tier: the same bytes come back, they are about half as many, and no engine is served
entries of the other kind."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forgery import forged
from head_helpers import HEADS, fill, of_share, opened, results, share
from remote_servers import Mooncake, Valkey
from safetensors import safe_open
from store_helpers import CONTEXT, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.heads import HeadRange
from kvmosaic.core.key import ChunkKey, content_hash
from kvmosaic.core.window import WHOLE, WindowTails
from kvmosaic.store import ChunkStorageManager, HostTier, MissReason, open_store
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.codec import decode
from kvmosaic.store.seal import EntryCheck
from kvmosaic.store.tiers.device import DeviceTier
from kvmosaic.store.tiers.disk import DiskTier, entry_path
from kvmosaic.store.tiers.remote import RemoteTier, open_remote_tier

PLENTY = 2**30
TOKENS = 50


def make_pair(
    number: int, heads: int = 2, layers: int = 3, tails: Any = WHOLE, dims: tuple[int, int] = (64, 64)
) -> list[ChunkKV]:
    """The same KV in the model's dtype and in 8 bits."""
    ids = tuple(range(number * 1000, number * 1000 + TOKENS))
    generator = torch.Generator().manual_seed(number)
    k, v = (torch.randn(heads, layers, TOKENS, dim, generator=generator).bfloat16() for dim in dims)
    names = ("f0", "f0.int8" if max(dims) <= 64 else "f0.int8x64")
    keys = [ChunkKey(content_hash(ids, CONTEXT), TOKENS, "org/model", name) for name in names]
    return [ChunkKV.from_kv(key, ids, CONTEXT, k, v, tails, "document") for key in keys]


def found(store: ChunkStorageManager, entry: ChunkKV) -> ChunkKV | None:
    return store.lookup(entry.key, entry.tokens, entry.context).entry


def check_values(small: ChunkKV, exact: ChunkKV) -> None:
    for layer in range(exact.format.layers):
        for ours, theirs in zip(small.layer(layer), exact.layer(layer), strict=True):
            bound = theirs.float().abs().amax(-1, keepdim=True) * (1.01 / 253 + torch.finfo(torch.bfloat16).eps)
            assert ((ours.float() - theirs.float()).abs() <= bound).all()


@pytest.fixture(params=["device", "host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return {
        "device": lambda: DeviceTier(torch.empty(PLENTY // 64, dtype=torch.uint8)),
        "host": lambda: HostTier(PLENTY),
        "disk": lambda: DiskTier(tmp_path, PLENTY),
    }[request.param]()


@pytest.mark.parametrize("tails", [WHOLE, WindowTails((0, 2), 17)])
@pytest.mark.parametrize("dims", [(64, 64), (512, 64), (256, 256), (6, 10)])
def test_a_tier_returns_what_was_put(tier: Any, tails: WindowTails, dims: tuple[int, int]) -> None:
    exact, small = make_pair(1, tails=tails, dims=dims)
    sizes = [tier.put(entry) for entry in (exact, small)]
    for entry in (exact, small):
        stored = tier.get(entry.key)
        assert stored is not None
        assert same(stored, entry)
    check_values(tier.get(small.key), exact)
    if sum(dims) > 100:
        assert sizes[1] < 0.6 * sizes[0]
    assert small.nbytes == small.format.nbytes(TOKENS)
    width = sum(dims)
    rows = tails.kept(0, TOKENS), tails.kept(1, TOKENS), tails.kept(2, TOKENS)
    scales, together = {64: (2, 4), 512: (9, 8), 256: (8, 4), 6: (2, 4)}[dims[0]]
    assert small.nbytes == 2 * sum(kept * width + 2 * scales * (-(-kept // together) * together) for kept in rows)


def test_twice_as_many_documents_fit_into_memory() -> None:
    pairs = [make_pair(number) for number in range(40)]
    held = []
    for kind in (0, 1):
        store = ChunkStorageManager([HostTier(10 * pairs[0][0].nbytes)])
        for pair in pairs:
            store.put(pair[kind])
        held.append(len(list(store.scan())))
    assert held[0] == 10
    assert held[1] == 19  # 20 minus the scales


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[ChunkStorageManager]]:
    """Two engines of one geometry on one directory."""
    config = load_config(disk_path=tmp_path, host_memory=PLENTY)
    made = [open_store(config, kv_format=make_pair(1)[0].format) for _ in range(2)]
    yield made
    for store in made:
        store.close()


def test_engines_of_both_kinds_share_a_directory(stores: list[ChunkStorageManager]) -> None:
    exact, small = make_pair(1)
    assert stores[0].put(exact)
    assert stores[1].put(small)
    for store in stores:
        store.flush()
    for store in stores:
        for entry in (exact, small):
            read = found(store, entry)
            assert read is not None
            assert same(read, entry)
        assert store.get_stats()["corrupt_set_aside"] == 0


def test_an_entry_in_8_bits_is_no_hit_for_an_exact_key(stores: list[ChunkStorageManager]) -> None:
    exact, small = make_pair(1)
    assert stores[0].put(small)
    stores[0].flush()
    for store in stores:
        assert store.lookup(exact.key, exact.tokens, exact.context).reason == MissReason.NEW


def test_bytes_of_the_other_kind_under_a_key_are_refused(tmp_path: Path) -> None:
    """The file is valid, but its key names the other kind."""
    exact, small = make_pair(1)
    check = EntryCheck(format=exact.format)
    for right, wrong in ((exact, small), (small, exact)):
        path = tmp_path / entry_path(right.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(forged(wrong, {"key": str(right.key)}))
        with pytest.raises(CorruptEntryError):
            DiskTier(tmp_path, PLENTY).get(right.key)  # also for a reader without a format
        path.write_bytes(forged(wrong, {"key": str(right.key)}))
        store = ChunkStorageManager([HostTier(PLENTY), DiskTier(tmp_path, PLENTY, check=check)], exact.format)
        assert store.lookup(right.key, right.tokens, right.context).reason == MissReason.CORRUPT
        assert found(store, right) is None
        assert store.put(right)
        again = found(store, right)
        assert again is not None
        assert same(again, right)
        store.close()


@pytest.mark.parametrize("said", ["int8", "int8x64"])
@pytest.mark.parametrize("knows_format", [True, False])
def test_long_rows_with_one_scale_are_never_read(tmp_path: Path, said: str, knows_format: bool) -> None:
    """Long rows once had a single scale. Such files may still exist, under keys that are not used any more. Under
    today's keys they are no entries."""
    exact, small = make_pair(1, heads=1, dims=(128, 128))
    old_key = replace(small.key, fingerprint="f0.int8")
    old_bytes = bytes(3 * (TOKENS * 256 + 2 * 2 * 52))
    check = EntryCheck(format=exact.format if knows_format else None)
    for key in (old_key, small.key):
        path = tmp_path / entry_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(forged(small, {"key": str(key), "numbers": said}, kv=old_bytes))
        if key == old_key:
            store = ChunkStorageManager([DiskTier(tmp_path, PLENTY, check=check)], exact.format)
            assert store.lookup(small.key, small.tokens, small.context).reason == MissReason.NEW
            store.close()
        with pytest.raises(CorruptEntryError):
            DiskTier(tmp_path, PLENTY, check=check).get(key)
    path.write_bytes(forged(small))  # so nothing else was refused
    read = DiskTier(tmp_path, PLENTY, check=check).get(small.key)
    assert read is not None
    assert same(read, small)


@pytest.mark.parametrize(("dims", "name"), [((64, 64), "int8"), ((128, 64), "int8x64")])
def test_any_reader_of_safetensors_sees_8_bits(tmp_path: Path, dims: tuple[int, int], name: str) -> None:
    _, small = make_pair(1, dims=dims)
    DiskTier(tmp_path, PLENTY).put(small)
    with safe_open(tmp_path / entry_path(small.key), "pt") as file:
        assert torch.equal(file.get_tensor("kv"), small.data)
        assert file.metadata()["numbers"] == name
        assert file.metadata()["dtype"] == "bfloat16"


def test_exact_entries_are_written_as_by_earlier_releases(tmp_path: Path) -> None:
    exact, _ = make_pair(1)
    DiskTier(tmp_path, PLENTY).put(exact)
    with safe_open(tmp_path / entry_path(exact.key), "pt") as file:
        assert "numbers" not in file.metadata()
    assert "int8" not in repr(exact.format)  # fingerprints contain it


@pytest.mark.parametrize("change", [{"numbers": "int4"}, {"numbers": ""}, {"numbers": "int8x64"}])
def test_unknown_numbers_are_refused(change: dict[str, str]) -> None:
    _, small = make_pair(1)
    value = np.frombuffer(forged(small, change), np.uint8)
    for check in (EntryCheck(), EntryCheck(format=small.format)):
        right = decode([np.frombuffer(forged(small), np.uint8)], str(small.key), check)
        assert same(right.entry(small.key, right.kv.copy(), right.format), small)
        with pytest.raises(CorruptEntryError):
            decode([value], str(small.key), check)


def test_a_remote_store_keeps_both_kinds(tier_of_servers: RemoteTier) -> None:
    exact, small = make_pair(1)
    sizes = [tier_of_servers.put(entry) for entry in (exact, small)]
    assert sizes[1] < 0.56 * sizes[0]
    for entry in (exact, small):
        read = tier_of_servers.get(entry.key)
        assert read is not None
        assert same(read, entry)


@pytest.fixture
def tier_of_servers(server: Valkey | Mooncake) -> Iterator[RemoteTier]:
    opened_tier = open_remote_tier(server.url, 10.0, check=EntryCheck(format=make_pair(1)[0].format))
    opened_tier.delete_all([info.key for info in opened_tier.scan()])
    yield opened_tier
    opened_tier.delete_all([info.key for info in opened_tier.scan()])
    opened_tier.close()


@pytest.mark.usefixtures("one_mooncake_client")
@pytest.mark.parametrize(("writers", "readers"), [(1, 4), (4, 2), (2, 8)])
def test_heads_are_read_at_other_tensor_parallel_sizes(server: Valkey | Mooncake, writers: int, readers: int) -> None:
    exact, small = make_pair(writers, heads=HEADS)
    fill(server.url, writers, [small])
    assert all(result.entry is not None for result in results(server.url, readers, small))
    assert all(result.entry is None for result in results(server.url, readers, exact))
    # A rank's slice gives the rank's rows, so scales were split with the heads.
    mine = share(1, readers)
    store = opened(server.url, mine)
    entry = found(store, of_share(small, mine))
    store.close()
    assert entry is not None
    heads = HeadRange.parse(entry.key.heads)
    assert heads is not None
    check_values(entry, of_share(exact, mine))


def test_a_format_knows_its_own_size() -> None:
    own = KVFormat(3, 2, 64, 64, torch.bfloat16)
    exact, small = make_pair(1)
    assert own.of(exact.key) == exact.format == own
    assert own.of(small.key) == small.format == replace(own, is_int8=True)
