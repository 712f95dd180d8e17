"""Cuts of prompts: the same text has the same cuts at any position, and clients cannot cause more of them."""

import random
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.discovery.cuts import MAX_SEGMENT, REACH, Cutter
from kvmosaic.core.prompt import Span

MARKER, SHORTEST = 7, 64
TEXTS = st.one_of(
    st.lists(st.integers(0, 9), max_size=600),  # with markers
    st.lists(st.integers(10, 60_000), max_size=600),
    st.lists(st.integers(8, 99), min_size=1, max_size=9).map(lambda period: period * 90),
)


def cut(tokens, covered=()):
    cuts = Cutter([MARKER], SHORTEST).cut(np.array(tokens, np.int64), covered)
    return cuts.edges.tolist(), cuts.is_barrier.tolist()


@given(TEXTS, st.data())
def test_segments_are_the_prompt_and_hold_nothing_that_no_run_may_hold(text, data):
    tokens = [*text, 5]
    first = data.draw(st.integers(0, len(text)))
    covered = [Span(first, data.draw(st.integers(first, len(tokens))))]
    edges, is_barrier = cut(tokens, covered)
    assert (edges[0], edges[-1]) == (0, len(tokens))
    assert edges == sorted(set(edges))
    assert is_barrier[-1]
    forbidden = {index for index, token in enumerate(tokens) if token == MARKER} | set(covered[0].positions)
    forbidden.add(len(tokens) - 1)
    for begin, end, barrier in zip(edges, edges[1:], is_barrier, strict=False):
        if not barrier:
            assert forbidden.isdisjoint(range(begin, end))
            assert end - begin <= MAX_SEGMENT
    free = [edge for edge, barrier in zip(edges, is_barrier, strict=False) if not barrier]
    assert len(free) <= len(tokens) / (REACH + 1) + len(tokens) / SHORTEST


@given(
    st.lists(st.integers(10, 60_000), min_size=200, max_size=400),
    st.lists(st.integers(10, 60_000), max_size=200),
    st.lists(st.integers(10, 60_000), max_size=200),
)
def test_cuts_inside_a_text_do_not_depend_on_what_stands_around_it(text, before, after):
    def inner(left, right):
        edges, _ = cut([*left, *text, *right, 5])
        inside = {edge - len(left) for edge in edges}
        return {edge for edge in inside if REACH < edge < len(text) - REACH}

    alone, among = inner([], []), inner(before, after)
    # In a text that has no cut for a while, further cuts depend on the position of the previous one.
    apart = sorted(alone | {0, len(text)})
    if max(b - a for a, b in pairwise(apart)) <= MAX_SEGMENT - 2 * REACH:
        assert alone == among


def test_text_that_is_too_short_for_a_run_is_not_cut():
    long, short = list(range(100, 100 + SHORTEST)), list(range(300, 299 + SHORTEST))
    edges, _ = cut([*short, MARKER, *long, MARKER, *short])
    begin = len(short) + 1
    assert edges[:2] == [0, begin]
    assert edges[-2:] == [begin + len(long), begin + len(long) + 1 + len(short)]


def test_cuts_before_a_marker_do_not_depend_on_the_text_behind_it():
    """Because a conversation continues behind markers."""
    for _ in range(50):
        beginning = [*(random.randrange(10, 60_000) for _ in range(100)), MARKER]
        rests = [[random.randrange(10, 60_000) for _ in range(length)] for length in (0, 9, 100)]
        cuts = [[edge for edge in cut([*beginning, *rest, 5])[0] if edge < len(beginning)] for rest in rests]
        assert cuts[0] == cuts[1] == cuts[2]
