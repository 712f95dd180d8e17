"""Hashes of blocks whose KV is not what vLLM would have computed."""

import hashlib
import random

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256, xxhash_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvmosaic.engines.vllm.scheduler_side.block_salts import BlockSalts
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
    chance = random.Random(seed)
    tokens = [chance.randrange(1000) for _ in range(chance.randrange(60))]
    plain, salted = small_blocks(tokens, hash_function), small_blocks(tokens, hash_function)
    salts, added = BlockSalts(salted), []
    for _ in range(30):
        if chance.random() < 0.2:
            first = chance.randrange(20)
            added.append((chance.randbytes(5), first, chance.choice([None, first, first + chance.randrange(20)])))
            salts.add(*added[-1])
        for each in (plain, salted):
            each.append_output_token_ids(len(added))
        assert len(salted.block_hashes) == len(plain.block_hashes) == plain.num_tokens // BLOCK
        assert salts.plain == plain.block_hashes
        for index, (before, after) in enumerate(zip(plain.block_hashes, salted.block_hashes, strict=True)):
            expected = int.from_bytes(before, "big")
            for salt, first, end in added:
                if first <= index and (end is None or index < end):
                    expected ^= int.from_bytes(hashlib.sha256(salt).digest()[-len(before) :], "big")
            assert after == expected.to_bytes(len(before), "big")


# --- of requests with chunks

PLAIN = [*SYSTEM, *FIRST, *SECOND, *QUESTION]
FIRST_SALTED = len(SYSTEM) // fakes.BLOCK
"""The block that the first chunk begins in."""


def hashes(*chunks, **params):
    """Block hashes of a request that the scheduler knows, with an answer of some tokens."""
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
        {"recompute_ratio": 1.0},
        {"recompute_ratio": 0.5, "policy": "sink-link"},
        {"recompute_ratio": 0.5, "policy": "sink-link(k=8)"},
    ],
)
def test_other_ratios_and_policies_have_other_hashes(params):
    for others in ({}, {"recompute_ratio": 0.5}):
        ours, theirs = hashes(**params), hashes(**others)
        assert ours[:FIRST_SALTED] == theirs[:FIRST_SALTED]
        assert not set(ours[FIRST_SALTED:]) & set(theirs)


def test_other_cuts_of_the_same_tokens_have_other_hashes():
    ours, theirs = hashes(), hashes([*FIRST, *SECOND])
    assert not set(ours[FIRST_SALTED:]) & set(theirs)


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
