"""Runs of tokens to compute: cutting them, and the data of a pass."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.engines.vllm.forward.runs import Pass, Run, cut, remaining, runs_of

BLOCKS = [[3, 1, 4]]


def make_pass(*runs, block_sizes=(4,)):
    return Pass(runs, block_sizes, torch.device("cpu"))


@given(st.lists(st.booleans(), max_size=60))
def test_runs_are_the_wanted_tokens_and_no_others(wanted):
    tokens = list(range(100, 100 + len(wanted)))
    runs = runs_of(np.array(wanted, dtype=bool), tokens, BLOCKS)
    covered = [position for run in runs for position in range(run.start, run.end)]
    assert covered == [position for position, is_wanted in enumerate(wanted) if is_wanted]
    assert all(list(run.tokens) == tokens[run.start : run.end] and run.blocks is BLOCKS for run in runs)
    assert all(first.end < second.start for first, second in pairwise(runs)), "runs that touch"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_remaining_runs_are_the_kept_tokens_of_runs(tokens):
    """Of several sequences, whose runs keep everything else."""
    wanted = np.array([is_wanted for is_wanted, _ in tokens], dtype=bool)
    others = [[7, 8, 9]]
    runs = [*runs_of(wanted, range(100, 160), BLOCKS, 3), *runs_of(wanted, range(200, 260), others)]
    kept = np.array([is_kept for is_wanted, is_kept in tokens if is_wanted] * 2, dtype=bool)
    left = remaining(runs, kept)
    expected = [place for place, both in enumerate(tokens) if all(both)]
    for blocks, first, adapter in ((BLOCKS, 100, 3), (others, 200, 0)):
        own = [run for run in left if run.blocks is blocks]
        assert all(run.adapter_id == adapter for run in own)
        assert [position for run in own for position in range(run.start, run.end)] == expected
        assert [token - first for run in own for token in run.tokens] == expected
        assert all(run.following is None or run.following == first + run.end for run in own)
        assert all(run.following is not None for run in own if run.end < len(tokens))


@given(st.lists(st.integers(1, 20), max_size=8), st.integers(0, 100))
def test_a_cut_keeps_all_tokens_in_order(lengths, room):
    runs, at = [], 0
    for length in lengths:
        runs.append(Run(range(at, at + length), at, BLOCKS))
        at += length + 2
    first, rest = cut(runs, room)
    assert sum(len(run.tokens) for run in first) == min(room, sum(lengths))
    assert all(len(run.tokens) > 0 for run in (*first, *rest))
    assert all(list(run.tokens) == list(range(run.start, run.end)) for run in (*first, *rest))
    together = [token for run in (*first, *rest) for token in run.tokens]
    assert together == [token for run in runs for token in run.tokens]


def test_a_pass_puts_neighbouring_runs_of_a_sequence_together():
    other = [[7, 8, 9]]
    a = make_pass(Run([10, 11], 1, BLOCKS), Run([12], 9, BLOCKS), Run([13, 14], 0, other), Run([15], 11, BLOCKS))
    assert a.num_tokens == 6
    assert [(each.positions.tolist(), each.blocks) for each in a.sequences] == [
        ([1, 2, 9], BLOCKS),
        ([0, 1], other),
        ([11], BLOCKS),
    ]
    assert a.token_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert a.token_ids.dtype == torch.int32
    assert a.positions.tolist() == [1, 2, 9, 0, 1, 11]
    assert a.positions.dtype == torch.int64


def test_equal_block_tables_of_two_requests_are_two_sequences():
    a = make_pass(Run([10], 0, [[3]]), Run([11], 1, [[3]]))
    assert len(a.sequences) == 2


@pytest.mark.parametrize(("position", "slot"), [(0, 12), (3, 15), (4, 4), (11, 19)])
def test_the_slot_of_a_token(position, slot):
    assert make_pass(Run([10], position, BLOCKS)).slots.tolist() == [[slot]]


def test_slots_of_several_cache_groups():
    blocks = [[3, 1], [5]]
    slots = make_pass(Run([10, 11], 3, blocks), Run([12], 0, [[9], [2]]), block_sizes=(4, 8)).slots
    assert slots.tolist() == [[15, 4, 36], [43, 44, 16]]
    assert slots.dtype == torch.int64


def test_the_token_behind_each_token():
    tokens = list(range(100, 110))
    wanted = np.zeros(10, dtype=bool)
    wanted[[1, 2, 3, 7, 8, 9]] = True
    first, last = runs_of(wanted, tokens, BLOCKS)
    assert make_pass(first, last).following_ids.tolist() == [102, 103, 104, 108, 109, 109]
    head, rest = first.split(2)
    assert make_pass(last, head).following_ids.tolist() == [108, 109, 109, 102, 103]
    assert make_pass(rest).following_ids.tolist() == [104]
    assert make_pass(first, last).following_ids.dtype == torch.int32
