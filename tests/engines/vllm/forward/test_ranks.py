"""Ranks agree by votes: whatever fails on one of them, all of them reach the same votes."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from kvmosaic.engines.vllm.forward.ranks import RankLostError, Ranks

COUNT = 3
PATIENCE = timedelta(seconds=20)
"""Time after which a rank that waits for the others fails."""


class ThreadRanks(Ranks):
    """One of several ranks that share all layers, each in a thread of this process. Their collectives are real."""

    def __init__(self, store, rank):
        group = SimpleNamespace(cpu_group=ProcessGroupGloo(store, rank, COUNT, PATIENCE), world_size=COUNT)
        self.rank, self.count, self._groups = rank, COUNT, [group]


def on_all_ranks(work):
    """The results of ``work``, called with each of the ranks at the same time."""
    store = HashStore()
    with ThreadPoolExecutor(COUNT) as threads:
        return list(threads.map(lambda rank: work(ThreadRanks(store, rank)), range(COUNT)))


def test_an_item_is_there_if_every_rank_has_it():
    held = [[True, True, False], [True, False, False], [True, True, True]]
    assert on_all_ranks(lambda ranks: ranks.all_have(held[ranks.rank])) == [[True, False, False]] * COUNT


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("fails_at", [None, 0, 1, 3])
def test_a_rank_that_fails_stops_all_of_them_at_the_same_vote(passes, fails_at):
    """It fails before one of the model's passes, or after the last one."""

    def compute(ranks):
        for number in range(passes + 1):
            if ranks.rank == 1 and number == fails_at:
                raise RuntimeError("a failure made for this test")
            if number < passes:
                ranks.go_on()
        return f"result of {ranks.rank}"

    def work(ranks):
        first = ranks.together(lambda: compute(ranks), "the first work")
        # The next votes are about the next matter on all ranks.
        return first, ranks.all_have([True, ranks.rank != 2]), ranks.together(lambda: "again", "the next work")

    fails = fails_at is not None and fails_at <= passes
    results = [None if fails else f"result of {rank}" for rank in range(COUNT)]
    assert on_all_ranks(work) == [(result, [True, False], "again") for result in results]


def test_several_ranks_fail_in_different_places():
    def compute(ranks):
        for number in range(COUNT):
            if number == ranks.rank:
                raise RuntimeError("a failure made for this test")
            ranks.sum(torch.ones(1))

    def work(ranks):
        return ranks.together(lambda: compute(ranks), "work"), float(ranks.sum(torch.ones(1)))

    assert on_all_ranks(work) == [(None, COUNT)] * COUNT


def test_a_rank_that_is_lost_inside_the_model_does_not_vote():
    """The others wait inside the model, not for a vote."""

    def lose():
        raise RankLostError("a failure made for this test")

    def work(ranks):
        if ranks.rank == 1:
            with pytest.raises(RankLostError):
                ranks.together(lose, "work")

    assert on_all_ranks(work) == [None] * COUNT
