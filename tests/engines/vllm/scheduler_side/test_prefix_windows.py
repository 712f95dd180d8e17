"""Segments of which layers with a sliding window keep only the end, and the requests that may use their blocks."""

import pytest
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from kvmosaic.engines.vllm.scheduler_side import prefix
from tests.engines.vllm.scheduler_side.fakes import BLOCK, HASHER, SEGMENT, Side, make_request, sha256, text
from tests.engines.vllm.scheduler_side.prefixes import prefix_digests

PROMPT = text(5, 3 * SEGMENT + 10)
PER_SEGMENT = SEGMENT // BLOCK
WINDOWED = {"window_tail": 32}


def stored(count=2, **shape):
    side = Side(prefix_blocks=True, shape=WINDOWED | shape)
    side.report(dict.fromkeys(prefix_digests(PROMPT)[:count], "host"))
    return side


def salted(request):
    """The blocks of a request whose hashes differ from vLLM's own."""
    plain = make_request("plain", list(request.all_token_ids), fields={"block_hasher": HASHER})
    return [ours != theirs for ours, theirs in zip(request.block_hashes, plain.block_hashes, strict=True)]


BLOCKS = len(PROMPT) // BLOCK


def expected(*segments, blocks=BLOCKS):
    return [index // PER_SEGMENT in segments for index in range(blocks)]


def load(side, request, local=0):
    side.begin(request, local, more=5)
    return side.step().prefix_loads


def test_blocks_that_are_brought_without_their_beginning_have_hashes_of_their_own():
    side = stored()
    request = side.add(make_request("a", PROMPT))
    assert not any(salted(request))
    load(side, request)
    assert salted(request) == expected(0, 1)


def test_where_all_is_kept_nothing_is_salted():
    side = stored(window_tail=SEGMENT)
    request = side.add(make_request("a", PROMPT))
    assert load(side, request)
    assert not any(salted(request))


def test_a_later_request_with_the_whole_segment_finds_them():
    side = stored()
    first = side.add(make_request("a", PROMPT))
    load(side, first)
    longer = side.add(make_request("b", [*PROMPT, *text(7, 40)]))
    shared = len(PROMPT) // BLOCK
    assert longer.block_hashes[:shared] == first.block_hashes[:shared]


def test_one_that_goes_on_differently_inside_a_segment_does_not():
    side = stored()
    first = side.add(make_request("a", PROMPT))
    load(side, first)
    other = side.add(make_request("b", [*PROMPT[: SEGMENT + 40], *text(7, 60)]))
    assert other.block_hashes[:PER_SEGMENT] == first.block_hashes[:PER_SEGMENT]
    assert not set(other.block_hashes[PER_SEGMENT:]) & set(first.block_hashes)
    shorter = side.add(make_request("c", PROMPT[: SEGMENT + 40]))
    assert not set(shorter.block_hashes[PER_SEGMENT:]) & set(first.block_hashes)


def test_a_prompt_that_ends_with_a_segment_does_not_use_that_one():
    """vLLM computes the prompt's last token, which is inside the segment."""
    side = stored()
    load(side, side.add(make_request("a", PROMPT)))
    assert salted(side.add(make_request("b", PROMPT[: 2 * SEGMENT]))) == expected(0, blocks=2 * PER_SEGMENT)
    assert salted(side.add(make_request("c", PROMPT[: 2 * SEGMENT + 1]))) == expected(0, 1, blocks=2 * PER_SEGMENT)


def test_blocks_that_the_prefix_cache_had_keep_their_hashes():
    side = stored()
    request = side.add(make_request("a", PROMPT))
    load(side, request, local=SEGMENT + 32)
    assert salted(request) == [PER_SEGMENT + 2 <= index < 2 * PER_SEGMENT for index in range(len(PROMPT) // BLOCK)]


def test_a_preempted_request_that_finds_less_salts_what_was_not_salted():
    side = stored()
    request = side.add(make_request("a", PROMPT))
    load(side, request, local=SEGMENT + 32)
    once = list(request.block_hashes)
    load(side, request, local=SEGMENT)
    assert salted(request) == expected(1)
    assert request.block_hashes[PER_SEGMENT + 2 :] == once[PER_SEGMENT + 2 :]  # the same salt twice would undo it
    load(side, request, local=SEGMENT)
    load(side, request, local=SEGMENT + 48)
    assert salted(request) == expected(1)


def test_who_stands_inside_a_cut_segment_has_all_of_it_brought_also_if_the_store_lost_it():
    """vLLM's own blocks before that token lack KV that later tokens see."""
    side = stored()
    load(side, side.add(make_request("a", PROMPT)))
    side.report(dict.fromkeys(prefix_digests(PROMPT)))
    request = side.add(make_request("b", PROMPT))
    assert side.matched(request, SEGMENT + 32) == SEGMENT - 32
    [message] = load(side, request, SEGMENT + 32)
    assert (message.start, len(message.tokens)) == (SEGMENT + 32, 2 * SEGMENT)
    other = side.add(make_request("c", PROMPT))
    assert side.matched(other, SEGMENT) == 0  # vLLM alone can continue from a segment's beginning


def test_a_failure_there_is_not_hidden(monkeypatch):
    """vLLM would go on with blocks that lack KV. Elsewhere the request is plain from then on."""
    side = stored()
    load(side, side.add(make_request("a", PROMPT)))
    request = side.add(make_request("b", PROMPT))
    with monkeypatch.context() as patch:
        patch.setattr(side.scheduler.prefixes, "matched", None)
        with pytest.raises(TypeError):
            side.matched(request, SEGMENT + 32)
        assert side.matched(request) == 0
    assert side.matched(request) == 0
    assert not load(side, request)


def test_the_answer_behind_is_hashed_as_by_vllm():
    side = stored()
    request = side.add(make_request("a", PROMPT))
    load(side, request)
    request.append_output_token_ids(text(8, 40))
    assert salted(request) == expected(0, 1, blocks=(len(PROMPT) + 40) // BLOCK)


def test_finer_hashes_than_blocks():
    side = stored(hash_block_size=8)
    hasher = get_request_block_hasher(8, sha256)
    request = side.add(make_request("a", PROMPT, fields={"block_hasher": hasher}))
    load(side, request)
    plain = make_request("plain", PROMPT, fields={"block_hasher": hasher})
    differs = [a != b for a, b in zip(request.block_hashes, plain.block_hashes, strict=True)]
    assert differs == [index < 2 * SEGMENT // 8 for index in range(len(PROMPT) // 8)]


def test_too_many_cut_segments_and_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(prefix, "REMEMBERED", 2)
    side = stored(3)
    load(side, side.add(make_request("a", PROMPT)))
    assert salted(side.add(make_request("b", PROMPT))) == expected(1, 2)


@pytest.mark.parametrize("tail", [None, SEGMENT])
def test_without_cut_segments_new_requests_are_not_hashed_twice(tail):
    side = stored(window_tail=tail)
    load(side, side.add(make_request("a", PROMPT)))
    request = side.add(make_request("b", PROMPT))
    assert not side.scheduler.prefixes._requests["b"].digests
    assert not any(salted(request))
