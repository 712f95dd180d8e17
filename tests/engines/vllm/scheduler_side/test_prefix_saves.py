"""Exact prefix segments that are saved to the store: which ones, when, and from which blocks."""

import pytest

from kvmosaic.engines.vllm.messages import PrefixSave
from tests.engines.vllm.scheduler_side.fakes import FIRST, SEGMENT, Side, ask_about, make_request, text
from tests.engines.vllm.scheduler_side.prefixes import prefix_digests

PROMPT = text(5, 3 * SEGMENT + 10)
DIGESTS = prefix_digests(PROMPT)


def started(tokens=PROMPT, **settings):
    """A plain request that begins, and the blocks it has."""
    side = Side(prefix_blocks=True, **settings)
    request = side.add(make_request("plain", tokens))
    _, blocks = side.begin(request, more=len(tokens) + 40)
    work = side.step(
        scheduled={"plain": 64}, computed={"plain": 0}, new=frozenset({"plain"}), blocks={"plain": blocks}
    )
    assert not work.prefix_saves
    return side, request, blocks


def saves(side, computed, tokens=64, **fields):
    """The segments that are saved with a step that continues after a number of tokens."""
    return side.step(scheduled={"plain": tokens}, computed={"plain": computed}, **fields).prefix_saves


def test_segments_are_saved_when_an_earlier_step_has_computed_all_of_them():
    side, _, blocks = started()
    assert saves(side, SEGMENT - 1) == []
    assert saves(side, SEGMENT) == [
        PrefixSave(
            tokens=tuple(PROMPT[:SEGMENT]), segments=((0, DIGESTS[0]),), segment_tokens=SEGMENT, blocks=tuple(blocks)
        )
    ]
    assert saves(side, SEGMENT) == []
    [save] = saves(side, 3 * SEGMENT + 5)
    assert save.segments == ((SEGMENT, DIGESTS[1]), (2 * SEGMENT, DIGESTS[2]))
    assert save.tokens == tuple(PROMPT[: 3 * SEGMENT])


def test_segments_of_a_quantised_cache_have_hashes_of_no_document():
    """The first segment of a prompt would otherwise be a document. Moved, its KV would be rounded twice."""
    side, _, _ = started(shape={"is_quantised": True})
    [save] = saves(side, 3 * SEGMENT)
    assert len(save.segments) == 3
    assert not {digest for _, digest in save.segments} & {*DIGESTS}


def test_what_the_store_has_is_not_saved():
    side, _, _ = started()
    side.report({DIGESTS[1]: "disk"})
    [save] = saves(side, 3 * SEGMENT)
    assert save.segments == ((0, DIGESTS[0]), (2 * SEGMENT, DIGESTS[2]))
    side.report({DIGESTS[1]: None})
    assert saves(side, 3 * SEGMENT) == []  # it was there, and was dropped: the next request saves it


def test_what_was_loaded_is_not_saved():
    side = Side(prefix_blocks=True)
    side.report(dict.fromkeys(DIGESTS[:2], "host"))
    request = side.add(make_request("plain", PROMPT))
    _, blocks = side.begin(request, more=40)
    side.step(scheduled={"plain": 64}, computed={"plain": 128}, new=frozenset({"plain"}), blocks={"plain": blocks})
    side.report(dict.fromkeys(DIGESTS))
    [save] = saves(side, 3 * SEGMENT)
    assert save.segments == ((2 * SEGMENT, DIGESTS[2]),)


def test_answers_are_saved_like_prompts():
    side, request, _ = started()
    answer = text(6, SEGMENT)
    request.append_output_token_ids(answer)
    [save] = saves(side, 4 * SEGMENT, 1)
    assert save.tokens == tuple([*PROMPT, *answer][: 4 * SEGMENT])
    assert [digest for _, digest in save.segments] == prefix_digests([*PROMPT, *answer])


def test_tokens_that_are_not_said_yet_are_not_saved():
    """vLLM may count a token as computed before the scheduler knows it."""
    side, request, _ = started(PROMPT[: SEGMENT - 2])
    request.append_output_token_ids(7)
    assert saves(side, SEGMENT, 1) == []
    request.append_output_token_ids(8)
    assert len(saves(side, SEGMENT, 1)) == 1


def test_where_there_are_drafts_answers_are_not_saved():
    """A block may still hold a draft that was refused."""
    side, request, _ = started(shape={"has_drafts": True})
    request.append_output_token_ids(text(6, 2 * SEGMENT))
    [save] = saves(side, 5 * SEGMENT)
    assert save.tokens == tuple(PROMPT[: 3 * SEGMENT])


def test_requests_that_begin_or_come_back_have_nothing_to_save_yet():
    side, _, blocks = started()
    assert saves(side, 3 * SEGMENT, resumed=frozenset({"plain"}), blocks={"plain": blocks}) == []
    assert len(saves(side, 3 * SEGMENT)) == 1


def test_after_a_preemption_the_new_blocks_are_read_and_only_for_what_was_not_saved():
    side, _, _ = started()
    assert len(saves(side, SEGMENT)) == 1
    saves(side, 0, resumed=frozenset({"plain"}), blocks={"plain": [7, 8, 9]})
    assert saves(side, SEGMENT) == []
    [save] = saves(side, 2 * SEGMENT)
    assert save.segments == ((SEGMENT, DIGESTS[1]),)
    assert save.blocks == (7, 8, 9)


def test_what_a_finished_request_left_is_saved_with_the_next_step():
    side, request, blocks = started()
    request.num_computed_tokens = 2 * SEGMENT
    side.scheduler.finished(request)
    work = side.step(finished=frozenset({"plain"}))
    [save] = work.prefix_saves
    assert [start for start, _ in save.segments] == [0, SEGMENT]
    assert save.blocks == tuple(blocks)
    assert not side.step().prefix_saves
    assert side.is_forgotten(request)


def test_a_request_that_is_aborted_before_it_got_blocks_leaves_nothing_to_save():
    side = Side(prefix_blocks=True)
    request = side.add(make_request("plain", PROMPT))
    side.scheduler.finished(request)
    assert side.step().is_empty


def test_requests_with_chunks_are_never_saved():
    side = Side(prefix_blocks=True)
    side.store(FIRST)
    request = side.add(ask_about(FIRST, text(6, 200)))
    _, blocks = side.begin(request, more=10)
    side.step(scheduled={"request": 10}, computed={"request": 260}, new=frozenset({"request"}))
    assert not side.step(scheduled={"request": 1}, computed={"request": 270}, blocks={"request": blocks}).prefix_saves
    request.num_computed_tokens = 271
    side.scheduler.finished(request)
    assert not side.step().prefix_saves


def test_a_request_that_fell_back_while_it_waited_is_not_saved():
    """Its block hashes are salted, and the part in the prefix cache may be blended."""
    side = Side(prefix_blocks=True)
    request = side.add(ask_about(text(6, 200)))
    assert side.matched(request) == 0
    assert side.counts("fallbacks") == {"not-stored": 1}
    side.begin(request, more=230)
    assert not side.step(scheduled={"request": 1}, computed={"request": 220}).prefix_saves


@pytest.mark.parametrize("is_finished", [False, True])
def test_an_emptied_store_gets_what_runs_anew(is_finished):
    side, request, _ = started()
    assert len(saves(side, SEGMENT)) == 1
    if is_finished:
        request.num_computed_tokens = 2 * SEGMENT
        side.scheduler.finished(request)
    side.scheduler.empty_memory()
    work = side.step(scheduled={"plain": 1}, computed={"plain": 2 * SEGMENT})
    assert work.empties_memory
    starts = [start for save in work.prefix_saves for start, _ in save.segments]
    assert starts == ([] if is_finished else [0, SEGMENT])


def test_saves_are_of_the_blocks_as_they_are_now():
    side, _, blocks = started()
    [save] = saves(side, SEGMENT, blocks={"plain": [77]})
    assert save.blocks == (*blocks, 77)
