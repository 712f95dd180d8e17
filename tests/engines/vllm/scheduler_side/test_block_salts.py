"""Hashes of blocks whose KV differs from the KV that vLLM would compute."""

import random
from itertools import pairwise

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256, xxhash_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.compat.scheduling import HIDDEN
from kvmosaic.engines.vllm.scheduler_side.block_salts import BlockSalt, BlockSalts
from tests.engines.vllm.scheduler_side import fakes
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    QUESTION,
    SECOND,
    SYSTEM,
    Side,
    ask_about,
    make_request,
    text,
)

BLOCK = 4


def small_blocks(tokens, hash_function):
    hasher = get_request_block_hasher(BLOCK, hash_function)
    return Request("0", tokens, SamplingParams(max_tokens=8), None, block_hasher=hasher)


@pytest.mark.parametrize("hash_function", [sha256, xxhash_cbor])
@pytest.mark.parametrize("seed", range(10))
def test_each_block_has_the_salts_that_were_added_for_it(seed, hash_function):
    init_none_hash(hash_function)  # as engines do when they start
    rng = random.Random(seed)
    tokens = [rng.randrange(1000) for _ in range(rng.randrange(60))]
    plain, salted = small_blocks(tokens, hash_function), small_blocks(tokens, hash_function)
    salts, added = BlockSalts(salted), []
    for _ in range(30):
        if rng.random() < 0.2:
            new = []
            for _ in range(rng.randrange(4)):
                first = rng.randrange(20)
                end = rng.choice([None, first, first + rng.randrange(20)])
                new.append(BlockSalt(rng.randbytes(32), first, end))
            salts.add(new)
            added += new
        if rng.random() < 0.2:  # blocks whose tokens are replaced are hashed again
            kept = rng.randrange(len(plain.block_hashes) + 1)
            del plain.block_hashes[kept:], salted.block_hashes[kept:]
        for each in (plain, salted):
            each.append_output_token_ids(len(added))
        assert len(salted.block_hashes) == len(plain.block_hashes) == plain.num_tokens // BLOCK
        assert salts.plain == plain.block_hashes
        for index, (before, after) in enumerate(zip(plain.block_hashes, salted.block_hashes, strict=True)):
            expected = int.from_bytes(before, "big")
            mine = [digest for digest, first, end, _ in added if first <= index and (end is None or index < end)]
            for digest in mine:
                expected ^= int.from_bytes(digest[-len(before) :], "big")
            mixed = expected.to_bytes(len(before), "big")
            assert after == (mixed[: -len(HIDDEN)] + HIDDEN if mine else mixed)


def test_a_request_keeps_its_salts_if_hashing_fails():
    init_none_hash(sha256)
    request = small_blocks(list(range(20)), sha256)
    hasher, fails = request._block_hasher, [True]

    def failing(request):
        if fails:
            raise ValueError("a failure made for this test")
        return hasher(request)

    request._block_hasher = failing
    salts = BlockSalts(request)
    salts.add([BlockSalt(random.randbytes(32), 0, None)])
    salted = list(request.block_hashes)
    with pytest.raises(ValueError, match="made for this test"):
        request.append_output_token_ids([1] * BLOCK)
    assert request.block_hashes == salted != salts.plain
    fails.clear()
    request.append_output_token_ids([1] * BLOCK)
    assert request.block_hashes[: len(salted)] == salted
    assert len(request.block_hashes) == len(salts.plain) == 7


# --- of requests with chunks

PLAIN = [*SYSTEM, *FIRST, *SECOND, *QUESTION]
FIRST_SALTED = len(SYSTEM) // fakes.BLOCK
"""The block that the first chunk begins in."""


def hashes(*chunks, **params):
    """Block hashes of a request that the scheduler follows, with an answer of some tokens."""
    made = Side().add(ask_about(*(chunks or (FIRST, SECOND)), **params))
    made.append_output_token_ids(text(70, 40))
    return made.block_hashes


def plain_hashes():
    made = make_request("plain", PLAIN)
    made.append_output_token_ids(text(70, 40))
    return made.block_hashes


def test_the_same_prompt_has_the_same_hashes():
    assert hashes() == hashes()
    assert hashes(recompute_ratio=0.5) == hashes(recompute_ratio=0.5)


def test_blocks_before_the_first_chunk_keep_their_hashes():
    assert hashes()[:FIRST_SALTED] == plain_hashes()[:FIRST_SALTED]
    assert FIRST_SALTED > 0


def test_no_block_with_chunk_tokens_or_behind_them_is_one_of_a_plain_request():
    ours, theirs = hashes(), plain_hashes()
    assert len(ours) == len(theirs) == (len(PLAIN) + 40) // fakes.BLOCK
    assert not set(ours[FIRST_SALTED:]) & set(theirs)


@pytest.mark.parametrize(
    "params",
    [
        {"recompute_ratio": 0.25},
        {"recompute_ratio": 0.5, "policy": "sink-link"},
        {"recompute_ratio": 0.5, "policy": "sink-link(k=8)"},
    ],
)
def test_other_ratios_and_policies_have_other_hashes(params):
    for others in ({}, {"recompute_ratio": 0.5}):
        ours, theirs = hashes(**params), hashes(**others)
        assert ours[:FIRST_SALTED] == theirs[:FIRST_SALTED]
        assert not set(ours[FIRST_SALTED:]) & set(theirs)


def test_at_ratio_one_hashes_are_those_of_a_plain_request():
    """All of its KV is that of a plain request."""
    assert hashes(recompute_ratio=1.0) == plain_hashes()


def test_other_cuts_of_the_same_tokens_have_other_hashes_from_the_first_difference_on():
    ours, theirs = hashes(), hashes([*FIRST, *SECOND])
    same = (len(SYSTEM) + len(FIRST)) // fakes.BLOCK
    assert ours[:same] == theirs[:same]
    assert not set(ours[same:]) & set(theirs[same:])


# --- of conversations

MARKERS = frozenset({7, 8})
"""Tokens that end a turn."""


def drawn_conversation(rng, turns):
    """Tokens with some spans that are chunks, and a marker at the end of each turn. Returns the conversation after
    each turn."""
    tokens, boundaries, states = [], [], []
    for _ in range(turns):
        tokens += rng.choices(range(10, 500), k=rng.randrange(1, 30))
        for _ in range(rng.randrange(4)):
            start = len(tokens)
            tokens += rng.choices(range(10, 500), k=rng.randrange(1, 40))
            boundaries.append((start, len(tokens)))
            tokens += rng.choices(range(10, 500), k=rng.choice([0, 0, 5]))
        tokens += rng.choices(range(10, 500), k=rng.randrange(1, 20))
        tokens += [7, 8]
        states.append((list(tokens), list(boundaries)))
    return states


def conversation_hashes(tokens, boundaries, *, shape=None, **params):
    side = Side(shape=shape)
    side.scheduler._planner._parser._markers = MARKERS
    whole = [(0, 0), *boundaries, (max([len(tokens) - 1, *(end for _, end in boundaries)]), len(tokens))]
    return side.add(make_request("a", tokens, boundaries=whole, **params)).block_hashes


PARAMS = [
    {"recompute_ratio": 0.0},
    {"recompute_ratio": 0.3, "policy": "sink-link"},
    {"recompute_ratio": 0.3, "policy": "composite"},
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: params.get("policy", "ratio-0"))
@pytest.mark.parametrize("seed", range(15))
def test_a_turn_has_the_hashes_of_the_turns_before_it(seed, params):
    states = drawn_conversation(random.Random(seed), 5)
    every = [conversation_hashes(*state, **params) for state in states]
    for before, after in pairwise(every):
        assert after[: len(before)] == before
        assert len(set(after)) == len(after)


@pytest.mark.parametrize("seed", range(15))
def test_hashes_differ_from_the_first_block_on_whose_chunks_do(seed):
    """If a chunk begins or ends elsewhere, or is missing, nothing is shared from that position on."""
    rng = random.Random(seed)
    tokens, boundaries = drawn_conversation(rng, 4)[-1]
    if not boundaries:
        return
    ours = conversation_hashes(tokens, boundaries)
    index = rng.randrange(len(boundaries))
    start, end = boundaries[index]
    for other, first in (((start + 1, end), start), ((start, end - 1), end - 1), (None, start)):
        changed = [*boundaries[:index], *([other] if other and other[0] < other[1] else []), *boundaries[index + 1 :]]
        theirs = conversation_hashes(tokens, changed)
        if other and other[0] >= other[1]:
            first = start
        same = first // fakes.BLOCK
        assert ours[:same] == theirs[:same]
        assert not set(ours[same:]) & set(theirs)


def test_blocks_of_a_chunk_that_is_cut_are_good_for_all_of_it_alone():
    """Layers with a sliding window keep only the end of such a chunk. A prompt that continues differently would read
    the missing part."""
    other = [*FIRST[:-1], 499]
    for tail, is_shared in ((None, True), (16, False)):
        both = [
            conversation_hashes([*SYSTEM, *chunk, *QUESTION], [(20, 60)], shape={"window_tail": tail})
            for chunk in (FIRST, other)
        ]
        assert (both[0][1] == both[1][1]) is (both[0][2] == both[1][2]) is is_shared


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: params.get("policy", "ratio-0"))
def test_what_is_chosen_by_the_end_of_a_chunk_is_shared_only_with_that_end(params):
    other = [*FIRST[:-1], 499]
    both = [
        conversation_hashes([*SYSTEM, *chunk, *QUESTION], [(20, 60)], **params)[FIRST_SALTED:3]
        for chunk in (FIRST, other)
    ]
    is_chosen_by_content = params.get("policy") == "composite"
    assert (both[0] == both[1]) is not is_chosen_by_content
    assert bool(set(both[0]) & set(both[1])) is not is_chosen_by_content


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: params.get("policy", "ratio-0"))
@pytest.mark.parametrize("chunk", [text(2, 40), [*text(2, 20), 7, 8, *text(3, 20)]], ids=["inside", "over a turn"])
def test_a_turn_shares_its_chunks_only_with_its_question_where_they_are_chosen_by_it(params, chunk):
    """A chunk that crosses turns, which only positions can name, belongs to the last of them. What comes after a turn
    changes none of its hashes."""
    before = [*SYSTEM, *FIRST, *QUESTION, 7, 8]
    boundaries = [(20, 60), (len(before), len(before) + len(chunk))]
    both = [
        conversation_hashes([*before, *chunk, *question, 7, 8], boundaries, **params)
        for question in (text(92, 30), text(93, 30))
    ]
    first, question = len(before) // fakes.BLOCK, (len(before) + len(chunk)) // fakes.BLOCK
    later = [*before, *chunk, *text(92, 30), 7, 8, *text(94, 30), 7, 8]
    assert conversation_hashes(later, boundaries, **params)[: len(both[0])] == both[0]
    assert both[0][:first] == both[1][:first]
    assert not set(both[0][question:]) & set(both[1][question:])
    is_chosen_by_content = params.get("policy") == "composite"
    assert bool(set(both[0][first:question]) & set(both[1][first:question])) is not is_chosen_by_content


@pytest.mark.parametrize(("ratio", "is_findable"), [(0.0, True), (0.5, False)])
def test_blocks_before_another_question_are_shared_where_nothing_is_chosen_by_it(ratio, is_findable):
    both = [
        Side().add(make_request("a", SYSTEM, FIRST, SECOND, question, recompute_ratio=ratio)).block_hashes
        for question in (QUESTION, text(77, 10))
    ]
    whole = 100 // fakes.BLOCK
    assert (both[0][FIRST_SALTED:whole] == both[1][FIRST_SALTED:whole]) is is_findable


def test_requests_that_are_served_plainly_from_the_start_keep_their_hashes():
    assert hashes(policy="oracle") == plain_hashes()
    assert hashes(chunk_cache=False) == plain_hashes()


def test_hashes_finer_than_blocks_are_salted_from_the_first_chunk_on():
    side = Side(shape={"hash_block_size": 8})
    hasher = get_request_block_hasher(8, sha256)
    ours = side.add(ask_about(FIRST, SECOND, fields={"block_hasher": hasher}))
    plain = make_request("plain", PLAIN, fields={"block_hasher": hasher})
    assert [a == b for a, b in zip(ours.block_hashes, plain.block_hashes, strict=True)] == [
        index < 20 // 8 for index in range(len(PLAIN) // 8)
    ]


def test_where_vllm_hashes_nothing_nothing_is_salted():
    assert hashes(fields={"block_hasher": None}) == []


@pytest.mark.parametrize(("ratio", "tail"), [(0.0, None), (0.5, None), (0.0, 32)])
def test_a_request_that_is_served_plainly_has_the_blocks_of_the_plain_prompt(tail, ratio):
    side = Side(shape={"window_tail": tail}, recompute_ratio=ratio)
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=ratio))
    plain = make_request("plain", request.prompt_token_ids)
    assert request.block_hashes != plain.block_hashes
    assert side.matched(request) == 0
    assert request.block_hashes == plain.block_hashes
    for each in (request, plain):
        each.append_output_token_ids(list(range(60)))
    assert request.block_hashes == plain.block_hashes


def test_a_request_that_has_blended_blocks_never_gets_the_hashes_of_the_plain_prompt():
    """What it computes behind them is no KV of the plain prompt."""
    side = Side(recompute_ratio=0.0)
    request = side.add(ask_about(FIRST, SECOND, recompute_ratio=0.0))
    plain = make_request("plain", request.prompt_token_ids)
    first = len(SYSTEM) // fakes.BLOCK
    behind = (first + 1) * fakes.BLOCK
    side.scheduler._serve_plainly(request, side.ours(request), behind, Fallback.SLOW_TIER)
    for mine, theirs in list(zip(request.block_hashes, plain.block_hashes, strict=True))[first:]:
        assert mine != theirs


@pytest.mark.parametrize("tail", [None, 32])
def test_requests_that_go_on_plainly_behind_blended_blocks_share_none_that_may_be_cut(tail):
    side = Side(shape={"window_tail": tail}, recompute_ratio=0.0)
    both = [side.add(ask_about(FIRST, SECOND, name=name, recompute_ratio=0.0)) for name in ("one", "other")]
    for request in both:
        behind = (FIRST_SALTED + 1) * fakes.BLOCK
        side.scheduler._serve_plainly(request, side.ours(request), behind, Fallback.SLOW_TIER)
    one, other = (request.block_hashes for request in both)
    assert one[:FIRST_SALTED] == other[:FIRST_SALTED]
    assert bool({*one[FIRST_SALTED:]} & {*other[FIRST_SALTED:]}) is (tail is None)


@pytest.mark.parametrize("tail", [None, 32])
def test_a_request_that_fails_shares_no_blocks_that_may_be_cut(monkeypatch, tail):
    """vLLM may ask about it again after others have loaded the same chunks."""
    side = Side(shape={"window_tail": tail}, recompute_ratio=0.0)
    other, request = (
        side.add(ask_about(FIRST, SECOND, name=name, recompute_ratio=0.0)) for name in ("other", "mine")
    )
    assert request.block_hashes == other.block_hashes
    monkeypatch.setattr(side.scheduler._waiting, "matched", None)
    assert side.matched(request) == 0
    shared = [mine == theirs for mine, theirs in zip(request.block_hashes, other.block_hashes, strict=True)]
    assert shared == [tail is None] * len(shared)
    if tail is not None:
        assert all(each.endswith(HIDDEN) for each in request.block_hashes)
    for each in (request, other):
        each.append_output_token_ids(list(range(60)))
    again = [mine == theirs for mine, theirs in zip(request.block_hashes, other.block_hashes, strict=True)]
    assert (again[: len(shared)], any(again[len(shared) :])) == (shared, tail is None)
