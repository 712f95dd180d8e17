"""The heads that a rank holds and writes, and their names in a remote store."""

from dataclasses import replace

import pytest
from head_helpers import LAYERS, model_entry, share
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.heads import HeadRange, HeadShare
from kvmosaic.store.remote.keys import HeadPoolKey, group_of, names_of, parse_remote_key, remote_key

texts = st.text(st.characters(codec="utf-8"), max_size=40)
head_keys = st.integers(0, 99).flatmap(
    lambda last: st.builds(
        HeadPoolKey,
        texts,
        texts,
        texts,
        st.binary(min_size=16, max_size=16),
        st.integers(1, 10**6),
        st.integers(0, last),
        st.just(last),
        st.integers(0, last),
        st.just(last + 1),
    )
)


@given(head_keys, head_keys)
def test_keys_are_told_apart_and_read_back(key: HeadPoolKey, other: HeadPoolKey) -> None:
    name = str(key)
    assert parse_remote_key(name) == key
    assert name.isascii()
    assert (str(other) == name) == (other == key)
    assert names_of(key.entry_key) == [name]
    assert group_of(name) == group_of(str(key._replace(head=0)))
    # It is never the name of an entry whose heads are stored together, even if a rank has just this head.
    together = remote_key(replace(key.entry_key, heads=f"{key.head}-{key.head}of{key.heads}"))
    assert together != name
    assert group_of(together) == group_of(name)


@pytest.mark.parametrize("part", ["L:0-1@head:8of8", "L:2-1@head:0of8", "L:0-1@head:00of8", "L:all@head:0-7of8L0-1"])
def test_names_that_are_no_heads(part: str) -> None:
    with pytest.raises(ValueError, match="not the key of"):
        parse_remote_key(f"kvmosaic-1:a@b@fmt:c@{'0' * 32}@1@{part}")


@given(
    st.sampled_from([1, 2, 4, 8, 16, 64]), st.sampled_from([1, 2, 4, 8, 16, 64]), st.binary(min_size=16, max_size=16)
)
def test_every_head_has_an_owner_and_one_writer(heads: int, ranks: int, content: bytes) -> None:
    """Heads are spread as in vLLM: consecutive heads, replicas next to each other."""
    shares = [HeadShare.of_rank(rank, ranks, heads, LAYERS) for rank in range(ranks)]
    owned = [head for own in shares for head in range(own.heads.first, own.heads.last + 1)]
    assert owned == sorted(list(range(heads)) * max(1, ranks // heads))
    written = [head for own in shares if own.writes(content) for head in range(own.heads.first, own.heads.last + 1)]
    assert written == list(range(heads))
    assert all(HeadRange.parse(str(own.heads)) == own.heads for own in shares)


def test_writers_take_turns() -> None:
    hashes = [model_entry(number).key.content_hash for number in range(200)]
    counts = [sum(map(share(rank, 16).writes, hashes)) for rank in (0, 1)]
    assert sum(counts) == 200
    assert min(counts) > 50


@pytest.mark.parametrize("ranks", [3, 12])
def test_heads_that_cannot_be_spread_evenly(ranks: int) -> None:
    with pytest.raises(ValueError, match="cannot be spread"):
        HeadShare.of_rank(0, ranks, 8, LAYERS)
