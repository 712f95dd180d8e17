"""Tensor parallelism: which heads this rank has, and what all ranks agree on."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from kvmosaic.core.heads import HeadShare
from kvmosaic.engines.vllm.compat.running import get_tp_group

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RankLostError(BaseException):
    """The model failed on one of several ranks, and the others wait inside it. The engine cannot continue from there,
    so handlers of ordinary failures must not catch this."""


class _ElsewhereError(Exception):
    """Another rank failed."""


class Ranks:
    """The tensor-parallel ranks, seen from one of them.

    They meet in collective operations, which all of them have to reach in the same order, even if something fails on
    one rank. So everything that may fail is either followed by a vote, or done *together*: ranks then vote before
    each pass of the model, and a rank that fails votes once against continuing, wherever it is. All of them leave at
    the same vote."""

    def __init__(self, model_config: Any, layers: int) -> None:
        self._group = get_tp_group()
        self.rank: int = self._group.rank_in_group
        self.count: int = self._group.world_size
        # vLLM gives every rank the whole latent that all heads share.
        heads = 1 if model_config.use_mla else model_config.get_total_num_kv_heads()
        self.share = HeadShare.of_rank(self.rank, self.count, heads, layers)

    def all_have(self, mine: Sequence[bool]) -> list[bool]:
        """Whether every rank has an item, for each item. All ranks call this with the same items in the same order.
        Ranks evict and fail independently, but must compute the same tokens."""
        if self.count == 1:
            return list(mine)
        votes = torch.tensor(mine, dtype=torch.int32)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return votes.bool().tolist()

    def together(self, work: Callable[[], T], what: str) -> T | None:
        """Do ``work``, which runs the model, on all ranks. Returns ``None`` on all ranks if it failed on one of them
        outside of the model; with a single rank also if it failed inside."""
        result: T | None = None
        is_done = False
        try:
            result, is_done = work(), True
        except _ElsewhereError:
            return None  # all have voted
        except Exception:
            logger.exception("%s failed", what)
        return result if self.all_have([is_done])[0] else None

    def go_on(self) -> None:
        """Vote before a collective operation. Raises if a rank failed on the way here."""
        if self.count > 1 and not self.all_have([True])[0]:
            raise _ElsewhereError

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, on the CPU."""
        total = mine.cpu()
        if self.count > 1:
            self.go_on()
            torch.distributed.all_reduce(total, group=self._group.cpu_group)
        return total

    def gather(self, mine: T) -> list[T]:
        """The values of all ranks, in the order of ranks."""
        if self.count == 1:
            return [mine]
        every: list[T | None] = [None] * self.count
        torch.distributed.all_gather_object(every, mine, group=self._group.cpu_group)
        return cast("list[T]", every)

    def first(self, mine: T) -> T:
        """The value of the first rank. Ranks that compute the same thing may still round differently, and one more
        token on one of them would leave the others waiting."""
        if self.count == 1:
            return mine
        box = [mine]
        torch.distributed.broadcast_object_list(box, self._group.ranks[0], group=self._group.cpu_group)
        return box[0]
