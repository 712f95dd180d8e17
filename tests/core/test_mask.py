"""The isolation rules, from the table of which token sees which."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.core.mask import ChunkAwareMaskBuilder
from kvmosaic.core.prompt import ChunkedPrompt, Span


def seen_by(mask, names):
    return {names[i]: {names[j] for j in range(len(names)) if mask[i, j] and i != j} for i in range(len(names))}


def test_the_example_of_the_specification():
    prompt = ChunkedPrompt(tuple(range(11)), (Span(3, 6), Span(6, 9)))
    sees = seen_by(ChunkAwareMaskBuilder("system").build(prompt), "ABCDEFGHIJK")
    assert sees == {
        "A": set(), "B": set("A"), "C": set("AB"),
        "D": set("ABC"), "E": set("ABCD"), "F": set("ABCDE"),
        "G": set("ABC"), "H": set("ABCG"), "I": set("ABCGH"),
        "J": set("ABCDEFGHI"), "K": set("ABCDEFGHIJ"),
    }  # fmt: skip


def test_alone_a_chunk_sees_only_itself():
    prompt = ChunkedPrompt(tuple(range(11)), (Span(3, 6), Span(6, 9)))
    sees = seen_by(ChunkAwareMaskBuilder("alone").build(prompt), "ABCDEFGHIJK")
    assert (sees["D"], sees["F"], sees["I"], sees["K"]) == (set(), set("DE"), set("GH"), set("ABCDEFGHIJ"))


@st.composite
def prompts(draw):
    cuts = sorted(draw(st.sets(st.integers(0, 30), min_size=2, max_size=8)))
    spans = [Span(a, b) for a, b in pairwise(cuts) if draw(st.booleans())]
    return ChunkedPrompt(tuple(range(cuts[-1] + draw(st.integers(1, 5)))), tuple(spans))


@given(prompt=prompts(), context=st.sampled_from(["alone", "system"]), data=st.data())
def test_mask_follows_the_rules_token_by_token(prompt, context, data):
    chunk_of = {i: n for n, span in enumerate(prompt.chunks) for i in span.positions}
    blended = data.draw(st.sets(st.sampled_from(sorted(chunk_of)))) if chunk_of else set()
    mask = ChunkAwareMaskBuilder(context).build(prompt, blended)
    for i in range(len(prompt.token_ids)):
        for j in range(len(prompt.token_ids)):
            free = i not in chunk_of or i in blended
            same = chunk_of.get(i) == chunk_of.get(j)
            system = context == "system" and j < prompt.system.end
            assert bool(mask[i, j]) == (j <= i and (free or same or system))


def test_ratio_one_is_plain_causal_attention():
    prompt = ChunkedPrompt(tuple(range(11)), (Span(3, 6), Span(6, 9)))
    assert torch.equal(ChunkAwareMaskBuilder().build(prompt, range(3, 9)), torch.ones(11, 11).tril().bool())
