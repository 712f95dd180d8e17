"""Keys and fingerprints: which are equal, and which differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.key import HASH_ALGORITHMS, ChunkKey, ContentHasher, content_hash, format_fingerprint

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(a=tokens, b=tokens, context_a=tokens, context_b=tokens, algorithm=st.sampled_from(list(HASH_ALGORITHMS)))
def test_hash_is_equal_exactly_when_content_and_context_are(a, b, context_a, context_b, algorithm):
    same = (a, context_a) == (b, context_b)
    assert (content_hash(a, context_a, algorithm) == content_hash(b, context_b, algorithm)) == same


@given(a=tokens, cut=st.integers(0, 20))
def test_moving_a_token_between_context_and_chunk_changes_the_hash(a, cut):
    cut = min(cut, len(a))
    assert (content_hash(a[cut:], a[:cut]) == content_hash(a)) == (cut == 0)


@given(chunks=st.lists(tokens, max_size=5), context=tokens, algorithm=st.sampled_from(list(HASH_ALGORITHMS)))
def test_chunks_of_one_context_have_the_hashes_they_have_alone(chunks, context, algorithm):
    hasher = ContentHasher(context, algorithm)
    assert [hasher.hash(chunk) for chunk in chunks] == [content_hash(chunk, context, algorithm) for chunk in chunks]


def test_hashes_never_change():
    """Entries on disk outlive the process: these values are part of the format."""
    assert content_hash([1, 2, 3]).hex() == "5211a8db825216270898ce701a11e56c"
    assert content_hash([1, 2, 3], [7], "sha256").hex() == "f02646e1a7acc8f6134f9db3d4cf0663"


def test_unknown_algorithm_is_one_line():
    with pytest.raises(ConfigError, match="unknown hash algorithm 'md5'; choose one of xxhash, sha256"):
        content_hash([1], algorithm="md5")


@given(
    digest=st.binary(min_size=16, max_size=16),
    count=st.integers(1, 10**6),
    names=st.tuples(*[st.text(min_size=1, max_size=30)] * 3),
)
def test_key_text_round_trip(digest, count, names):
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return
    key = ChunkKey(digest, count, *names)
    assert ChunkKey.parse(str(key)) == key


@pytest.mark.parametrize("text", ["", "a@b", "a@b@c@zz@1", "a@b@c@00@1", "a@b@c@" + "0" * 32 + "@x"])
def test_other_text_is_not_a_key(text):
    with pytest.raises(ValueError):  # noqa: PT011 - any ValueError will do
        ChunkKey.parse(text)


def test_fingerprint_sees_every_field():
    base = {"dtype": "float32", "rope": {"theta": 1e4}, "sink": [1]}
    seen = {format_fingerprint(**base)}
    for change in ({"dtype": "bfloat16"}, {"rope": {"theta": 1e5}}, {"sink": []}, {"extra": 1}):
        seen.add(format_fingerprint(**{**base, **change}))
    assert len(seen) == 5
    assert format_fingerprint(a=1, b=2) == format_fingerprint(b=2, a=1)
