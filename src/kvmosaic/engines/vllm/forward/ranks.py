"""Tensor parallelism: which heads this rank has, and what all ranks agree on."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from kvmosaic.core.heads import HeadShare
from kvmosaic.engines.vllm.compat.running import get_tp_group

T = TypeVar("T")


class Ranks:
    """The tensor-parallel ranks, seen from one of them."""

    def __init__(self, model_config: Any, layers: int) -> None:
        self._group = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.count: int = self._group.world_size
        # Of a latent that all heads share, vLLM gives every rank all of it.
        heads = 1 if model_config.use_mla else model_config.get_total_num_kv_heads()
        self.share = HeadShare.of_rank(self.rank, self.count, heads, layers)

    def all_have(self, mine: Sequence[bool]) -> list[bool]:
        """Which of these every rank has: called by all with the same things in the same order. Ranks evict and fail
        on their own, but must compute the same tokens."""
        if self.count == 1:
            return list(mine)
        votes = torch.tensor(mine, dtype=torch.int32)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return votes.bool().tolist()

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, on the CPU."""
        total = mine.cpu()
        if self.count > 1:
            torch.distributed.all_reduce(total, group=self._group.cpu_group)
        return total

    def first(self, mine: T) -> T:
        """What the first rank has: ranks that compute alike may still round differently, and one token more on one of
        them would leave the others waiting."""
        if self.count == 1:
            return mine
        box = [mine]
        torch.distributed.broadcast_object_list(box, self._group.ranks[0], group=self._group.cpu_group)
        return box[0]
