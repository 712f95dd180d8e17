"""The eviction policy alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import make_entry

from kvmosaic.bench import eviction as bench
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import ChunkStorageManager, HostTier
from kvmosaic.store.eviction import S3Fifo


def fill(policy: S3Fifo[int], key: int, nbytes: int = 1) -> list[int] | None:
    victims = policy.make_room(nbytes)
    if victims is not None:
        policy.add(key, nbytes)
    return victims


def test_a_long_scan_does_not_flush_popular_keys() -> None:
    policy = S3Fifo[int](100)
    for key in range(50):
        fill(policy, key)
        policy.touch(key)
    for key in range(1000, 11_000):
        fill(policy, key)
    assert all(key in policy for key in range(50))


def test_a_key_that_comes_back_soon_is_kept() -> None:
    policy = S3Fifo[int](100)
    for key in range(150):
        fill(policy, key)
    assert 0 not in policy
    fill(policy, 0)
    for key in range(1000, 5000):
        fill(policy, key)
    assert 0 in policy


def test_what_cannot_fit_evicts_nothing() -> None:
    policy = S3Fifo[int](10)
    for key in range(10):
        fill(policy, key)
    assert policy.make_room(11) is None
    for key in range(8):
        policy.pin(key)
    assert policy.make_room(3) is None
    assert len(policy) == 10
    assert set(policy.make_room(2) or ()) == {8, 9}


@settings(deadline=None)
@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.sampled_from("aartmpu"), st.integers(0, 15), st.integers(0, 25)), max_size=80),
)
def test_keeps_to_the_budget_and_never_names_a_pinned_key(
    capacity: int, operations: list[tuple[str, int, int]]
) -> None:
    policy = S3Fifo[int](capacity)
    held: dict[int, int] = {}
    pinned: set[int] = set()
    for operation, key, nbytes in operations:
        if operation == "p":
            policy.pin(key)
            pinned.add(key)
        elif operation == "u":
            policy.unpin(key)
            pinned.discard(key)
        elif operation == "r":
            policy.remove(key)
            held.pop(key, None)
        elif operation == "t":
            policy.touch(key)
        elif key not in held:
            victims = policy.make_room(nbytes)
            locked = sum(size for other, size in held.items() if other in pinned)
            assert (victims is None) == (locked + nbytes > capacity)
            for victim in victims or ():
                assert victim not in pinned
                del held[victim]
            if victims is not None:
                policy.add(key, nbytes)
                held[key] = nbytes
        assert policy.nbytes == sum(held.values()) <= capacity
        assert len(policy) == len(held)
        assert all(key in policy for key in held)


@pytest.mark.parametrize("pinned", [100, 3000])
def test_an_eviction_costs_the_same_however_many_keys_are_pinned(
    pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost is counted in hashes of keys, one for each key that is looked at."""
    one = make_entry(0, tokens=1).nbytes
    store = ChunkStorageManager([HostTier((pinned + 20) * one)])
    entries = [make_entry(number, tokens=1) for number in range(pinned + 220)]
    hashes = 0

    def counted(key: ChunkKey) -> int:
        nonlocal hashes
        hashes += 1
        return hash(key.content_hash)

    with store.pin([entry.key for entry in entries[:pinned]]):
        for entry in entries[: pinned + 20]:
            assert store.put(entry)
        store.put(entries[pinned + 20])  # which finds the pinned ones, once
        monkeypatch.setattr(ChunkKey, "__hash__", counted)
        for entry in entries[pinned + 21 :]:
            assert store.put(entry)
    assert store.get_stats()["evictions"] == 200
    assert all(store.contains(entry.key) for entry in entries[:pinned])
    assert hashes < 200 * 60 + 20 * pinned  # the latter once they are unpinned and used


def test_beats_lru_when_scans_are_mixed_in() -> None:
    requests = list(bench.trace(seed=1))[:30_000]
    popular = sum({key: nbytes for key, nbytes in requests if key < bench.POPULAR}.values())
    for share in (0.05, 0.2):
        budget = int(share * popular)
        s3fifo = bench.replay(S3Fifo[int](budget), requests)
        lru = bench.replay(bench.LRU(budget), requests)
        assert s3fifo > lru + 0.03
