"""Hashes of blocks whose KV is not what vLLM would have computed."""

import hashlib
import random

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256, xxhash_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvmosaic.engines.vllm.compat import BlockSalts

BLOCK = 4


def request(tokens, hash_function):
    hasher = get_request_block_hasher(BLOCK, hash_function)
    return Request("0", tokens, SamplingParams(max_tokens=8), None, block_hasher=hasher)


@pytest.mark.parametrize("hash_function", [sha256, xxhash_cbor])
@pytest.mark.parametrize("seed", range(10))
def test_each_block_has_the_salts_that_were_added_for_it(seed, hash_function):
    init_none_hash(hash_function)  # as engines do when they start
    chance = random.Random(seed)
    tokens = [chance.randrange(1000) for _ in range(chance.randrange(60))]
    plain, salted = request(tokens, hash_function), request(tokens, hash_function)
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
