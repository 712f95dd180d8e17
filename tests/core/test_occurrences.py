"""Texts in another one, compared with Python's own search."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core import occurrences as module
from kvmosaic.core.occurrences import WINDOW, Needle, occurrences

WORDS = ["a", "ferry", "harbour", "é", "\n", "42", "日本", "dash - dash"]


def by_hand(text: bytes, needle: bytes) -> list[int]:
    """All places of ``needle``, overlapping ones as well."""
    return [place for place in range(len(text)) if text.startswith(needle, place)]


@given(
    texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=2, max_size=30).map(" ".join), min_size=1, max_size=8),
    order=st.lists(st.integers(0, 7), max_size=12),
    block=st.sampled_from([1, 2, 7, module.BLOCK]),
)
def test_all_places_are_found_in_blocks_of_any_size(texts, order, block):
    whole = " ".join(texts[index % len(texts)] for index in order).encode()
    needles = [Needle(text) for text in dict.fromkeys(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        found = occurrences(whole, needles, len(whole))
    assert len(found) == len({(place, id(needle)) for place, needle in found})
    for needle in needles:
        places = sorted(place for place, each in found if each is needle)
        wanted = by_hand(whole, needle.bytes) if len(needle.bytes) >= WINDOW else []
        assert places == wanted if needle.is_known else set(places) <= set(wanted)


def test_a_needle_with_too_many_matches_is_given_up_and_others_are_found():
    text = random.choice(["ab", "xyz", "dash "]) * 5000
    common, rare = Needle(text[:600]), Needle("The ferry leaves the harbour at seven.")
    whole = f"{text} {rare.bytes.decode()} {text}".encode()
    found = occurrences(whole, [common, rare], len(whole))
    assert [place for place, needle in found if needle is rare] == [len(text) + 1]
    assert rare.is_known
    assert not common.is_known
