"""The rules that every tier keeps (``store/base.py``). A new tier needs one line in ``PLACES``."""

import importlib
import pkgutil
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from remote_servers import DEADLINE_S
from store_helpers import make_entry, same

from kvmosaic.core.entry import ChunkKV
from kvmosaic.store import DiskTier, HostTier, Tier, tiers
from kvmosaic.store.tiers.device import DeviceTier
from kvmosaic.store.tiers.guarded import GuardedTier
from kvmosaic.store.tiers.remote import RemoteTier, open_remote_tier

PLENTY = 2**27


class Place(NamedTuple):
    """A tier of some kind, and how it is opened: with a folder, and the address of a server if it names one."""

    kind: type[Tier]
    open: Callable[[Path, str], Tier]
    server: str | None = None


PLACES = {
    "device": Place(DeviceTier, lambda folder, url: DeviceTier(torch.empty(PLENTY, dtype=torch.uint8))),
    "host": Place(HostTier, lambda folder, url: HostTier(PLENTY)),
    "disk": Place(DiskTier, lambda folder, url: DiskTier(folder, PLENTY)),
    "guarded": Place(GuardedTier, lambda folder, url: GuardedTier(DiskTier(folder, PLENTY), "the disk")),
    "valkey": Place(RemoteTier, lambda folder, url: open_remote_tier(url, DEADLINE_S), "valkey_server"),
    "mooncake": Place(RemoteTier, lambda folder, url: open_remote_tier(url, DEADLINE_S), "mooncake_server"),
}


@pytest.fixture(params=PLACES)
def opening(
    request: pytest.FixtureRequest, tmp_path: Path, one_mooncake_client: None
) -> Iterator[Callable[[], Tier]]:
    """Opens a tier of each kind. The first one is empty; later ones have the same folder and server."""
    place = PLACES[request.param]
    url = "" if place.server is None else request.getfixturevalue(place.server).url
    opened: list[Tier] = []

    def opening() -> Tier:
        opened.append(place.open(tmp_path, url))
        opened[-1].prepare()
        return opened[-1]

    first = opening()
    first.delete_all([info.key for info in first.scan()])
    yield opening
    first.delete_all([info.key for info in first.scan()])
    for each in opened:
        each.close()


@pytest.fixture
def tier(opening: Callable[[], Tier]) -> Tier:
    return opening()


def read(tier: Tier, entry: ChunkKV) -> ChunkKV:
    found = tier.get(entry.key)
    assert found is not None
    return found


def test_every_kind_of_tier_is_tested() -> None:
    for module in pkgutil.iter_modules(tiers.__path__, f"{tiers.__name__}."):
        importlib.import_module(module.name)
    ours = {kind for kind in Tier.__subclasses__() if kind.__module__.startswith(tiers.__name__)}
    assert {place.kind for place in PLACES.values()} == ours, "a tier is missing in PLACES"


def test_it_is_ready_and_says_what_it_is(tier: Tier) -> None:
    tier.check()
    assert tier.is_up
    assert tier.name
    assert tier.capacity in (None, PLENTY)
    assert tier.is_slow or not tier.is_far


def test_nothing_is_there_at_first(tier: Tier) -> None:
    key = make_entry(1).key
    assert tier.size(key) is None
    assert tier.get(key) is None
    assert tier.holds([key]) == [False]
    assert tier.holds([]) == []
    assert [take() for _, take in tier.get_all([key])] == [None]
    assert not list(tier.scan())
    tier.delete(key)
    tier.delete_all([key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.uint8])
def test_an_entry_comes_back_as_it_was_put(tier: Tier, dtype: torch.dtype) -> None:
    entry = make_entry(1, tokens=7, heads=4, dtype=dtype, tenant="ü/@:*")
    size = tier.put(entry)
    assert size == tier.size(entry.key) <= tier.nbytes(entry)
    assert same(read(tier, entry), entry)
    assert [(info.key, info.nbytes, info.tier, info.pinned) for info in tier.scan()] == [
        (entry.key, size, tier.name, False)
    ]
    tier.delete(entry.key)
    assert (tier.size(entry.key), tier.get(entry.key), list(tier.scan())) == (None, None, [])
    assert tier.set_aside == 0


def test_a_view_of_larger_memory_comes_back_as_it_was_put(tier: Tier) -> None:
    entry = make_entry(1, tokens=7, heads=4)
    around = torch.zeros(3, *entry.data.shape, dtype=entry.data.dtype)
    around[1] = entry.data
    tier.put(replace(entry, data=around[1]))
    around.zero_()  # its memory may be used again as soon as the entry is stored
    assert same(read(tier, entry), entry)


def test_a_large_entry(tier: Tier) -> None:
    entry = make_entry(1, tokens=192, heads=8, layers=32, k_dim=128, v_dim=128)
    assert 24 * 2**20 <= tier.put(entry) <= tier.nbytes(entry)
    assert same(read(tier, entry), entry)


@pytest.mark.parametrize("part", ["tenant", "model", "fingerprint", "content_hash", "num_tokens", "heads"])
def test_keys_that_differ_in_any_part_are_different(tier: Tier, part: str) -> None:
    entry = make_entry(1, tenant="a")
    others = {"content_hash": bytes(16), "num_tokens": entry.key.num_tokens + 1, "heads": "0-0of2"}
    other = replace(entry.key, **{part: others.get(part, "b")})
    tier.put(entry)
    assert tier.holds([entry.key, other]) == [True, False]
    assert (tier.size(other), tier.get(other)) == (None, None)
    tier.delete(other)
    assert same(read(tier, entry), entry)


def test_many_keys_at_once(tier: Tier) -> None:
    entries = [make_entry(number) for number in range(1200)]
    for entry in entries[::2]:
        tier.put(entry)
    keys = [entry.key for entry in entries]
    assert tier.holds(keys) == [True, False] * 600
    assert {info.key for info in tier.scan()} == set(keys[::2])
    some = random.sample(entries, 30)
    for entry, (key, take) in zip(some, tier.get_all([each.key for each in some]), strict=True):
        found = take()
        assert key == entry.key
        assert (found is None) == (entries.index(entry) % 2 == 1)
        assert found is None or same(found, entry)
    tier.delete_all(keys[:600])
    assert tier.holds(keys) == [False] * 600 + [True, False] * 300
    tier.delete_all(iter(keys))
    assert not any(tier.holds(keys))


def test_what_is_older_is_listed_first_if_the_place_tells(tier: Tier) -> None:
    entries = random.sample([make_entry(number) for number in range(6)], 6)
    for entry in entries:
        tier.put(entry)
        time.sleep(0.02)  # clocks of file systems are coarse
    listed = [info.key for info in tier.scan()]
    assert len(listed) == 6
    assert tier.is_far or listed == [entry.key for entry in entries]


def test_entries_outlive_the_process_in_tiers_outside_it(opening: Callable[[], Tier]) -> None:
    entry = make_entry(1)
    first = opening()
    first.put(entry)
    first.close()
    again = opening()
    assert again.holds([entry.key]) == [again.is_slow]
    if again.is_slow:
        assert same(read(again, entry), entry)


def test_threads_do_not_disturb_each_other(tier: Tier) -> None:
    """Each has its own entries of many sizes, and all list them."""

    def use(thread: int) -> int:
        chance, held = random.Random(thread), {}
        for number in range(thread * 100, thread * 100 + 40):
            entry = make_entry(number, tokens=chance.randint(1, 9))
            tier.put(entry)
            held[number] = entry
            if chance.random() < 0.4:
                tier.delete(held.pop(chance.choice(list(held))).key)
            if held:
                wanted = chance.choice(list(held.values()))
                assert same(read(tier, wanted), wanted)
            if number % 10 == 0:
                assert {each.key for each in held.values()} <= {info.key for info in tier.scan()}
        assert all(tier.holds([entry.key for entry in held.values()]))
        return len(held)

    with ThreadPoolExecutor(4) as threads:
        left = sum(threads.map(use, range(4)))
    assert len(list(tier.scan())) == left
