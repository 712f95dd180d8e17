"""The ranks of an engine: which heads and layers this one has, and what all of them agree on."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from kvmosaic.core.heads import HeadShare
from kvmosaic.engines.vllm.compat.running import get_pp_group, get_tp_group

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RankLostError(BaseException):
    """The model failed on one of several ranks that share its layers, and the others wait inside it. The engine
    cannot continue from there, so handlers of ordinary failures must not catch this."""


class _ElsewhereError(Exception):
    """Another rank failed."""


class Ranks:
    """The ranks of tensor and pipeline parallelism, seen from one of them.

    They meet in collective operations, which all of them have to reach in the same order, even if something fails on
    one rank. So everything that may fail is either followed by a vote, or done *together*: ranks then vote before
    each pass of the model, and a rank that fails votes once against continuing, wherever it is. All of them leave at
    the same vote.

    Each operation is done in the tensor-parallel group and then in the pipeline-parallel group, or the other way
    round. Together these two reach every rank."""

    def __init__(self, model_config: Any, layers: int, drafts: int = 0) -> None:
        """``layers``: number of layers that this rank has; ``drafts``: number of layers of a draft model in entries,
        behind the model's."""
        tensor, pipeline = get_tp_group(), get_pp_group()
        self._groups = [group for group in (tensor, pipeline) if group.world_size > 1]
        self.per_stage: int = tensor.world_size
        """Number of ranks that share each layer."""
        self.stages: int = pipeline.world_size
        self.count = self.per_stage * self.stages
        self.rank: int = pipeline.rank_in_group * self.per_stage + tensor.rank_in_group
        counts = self.gather(layers)[:: self.per_stage]
        first = sum(counts[: pipeline.rank_in_group])
        self.layers = range(first, first + layers)
        """Layers of the model that this rank has."""
        self.num_layers = sum(counts)
        # vLLM gives every rank the whole latent that all heads share.
        heads = 1 if model_config.use_mla else model_config.get_total_num_kv_heads()
        self.share = HeadShare.of_rank(tensor.rank_in_group, self.per_stage, heads, layers + drafts, first)

    def all_have(self, mine: Sequence[bool]) -> list[bool]:
        """Whether every rank has an item, for each item. All ranks call this with the same items in the same order.
        Ranks evict and fail independently, but must compute the same tokens."""
        if self.count == 1:
            return list(mine)
        votes = torch.tensor(mine, dtype=torch.int32)
        for group in self._groups:
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return votes.bool().tolist()

    def together(self, work: Callable[[], T], what: str) -> T | None:
        """Do ``work``, which runs the model, on all ranks. Returns ``None`` on all ranks if one failed outside
        the model. If no other rank shares its layers, a failure inside also returns ``None``."""
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
        for group in self._groups:
            torch.distributed.all_reduce(total, group=group.cpu_group)
        return total

    def gather(self, mine: T) -> list[T]:
        """The values of all ranks, in the order of ranks."""
        values = [mine]
        for group in self._groups:
            every: list[list[T] | None] = [None] * group.world_size
            torch.distributed.all_gather_object(every, values, group=group.cpu_group)
            values = [value for part in cast("list[list[T]]", every) for value in part]
        return values

    def of_all_layers(self, mine: Sequence[T]) -> list[T]:
        """Values of all layers of the model, of which this rank has those of its own layers."""
        return [value for stage in self.gather(list(mine))[:: self.per_stage] for value in stage]

    def first(self, mine: T) -> T:
        """The value of the first rank. Ranks that compute the same thing may still round differently, and one more
        token on one of them would leave the others waiting."""
        return self._of(0, mine)

    def last(self, mine: T) -> T:
        """The value of the last rank. Only the last stage has the model's outputs."""
        return self._of(-1, mine)

    def _of(self, index: int, mine: T) -> T:
        box = [mine]
        for group in self._groups:
            torch.distributed.broadcast_object_list(box, group.ranks[index], group=group.cpu_group)
        return box[0]
