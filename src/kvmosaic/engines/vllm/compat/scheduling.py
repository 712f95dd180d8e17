"""What vLLM's scheduler has and tells: steps, free blocks, block hashes, events."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as event_hash
from vllm.v1.core.kv_cache_utils import resolve_block_hashes

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "Borrowed",
    "FreeBlocks",
    "KVCacheEvent",
    "Step",
    "block_hasher",
    "count_cached_tokens",
    "do_before_forward",
    "event_hash",
    "resolve_block_hashes",
    "set_block_hasher",
]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as the scheduler planned it: a ``SchedulerOutput``, less what we do not need."""

    scheduled: dict[str, int] = field(default_factory=dict)
    """Tokens that the forward computes, by request."""
    computed: dict[str, int] = field(default_factory=dict)
    """Tokens that were computed or loaded before, by scheduled request."""
    new: frozenset[str] = frozenset()
    """Requests that begin."""
    resumed: frozenset[str] = frozenset()
    """Requests that come back after a preemption."""
    blocks: dict[str, list[int]] = field(default_factory=dict)
    """Block ids that requests got: all of them for those that begin or come back, else those in addition."""
    finished: frozenset[str] = frozenset()
    """Requests that ended since the step before."""

    @classmethod
    def of(cls, output: Any) -> "Step":
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        got = zip(cached.req_ids, cached.new_block_ids, strict=True)
        blocks = {request_id: list(ids[0]) for request_id, ids in got if ids is not None}
        blocks.update((new.req_id, list(new.block_ids[0])) for new in output.scheduled_new_reqs)
        return cls(
            scheduled=output.num_scheduled_tokens,
            computed=computed,
            new=frozenset(new.req_id for new in output.scheduled_new_reqs),
            resumed=frozenset(cached.resumed_req_ids),
            blocks=blocks,
            finished=frozenset(output.finished_req_ids),
        )

    @property
    def total_tokens(self) -> int:
        return sum(self.scheduled.values())

    @property
    def only_decodes(self) -> bool:
        """Whether no prompt is computed."""
        return self.total_tokens <= len(self.scheduled)


class Borrowed(NamedTuple):
    """Blocks out of vLLM's pool."""

    ids: tuple[int, ...]
    handles: list[Any]
    """What the pool takes back."""


class FreeBlocks:
    """vLLM's pool of blocks, from which a step may borrow."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def count(self) -> int:
        free: int = self._pool.get_num_free_blocks()
        return free

    def borrow(self, count: int) -> Borrowed:
        """``count`` blocks, at most as many as are free."""
        blocks = self._pool.get_new_blocks(count)
        return Borrowed(tuple(block.block_id for block in blocks), blocks)

    def give_back(self, borrowed: Borrowed) -> None:
        """Free them. The next owner writes them in a later step."""
        self._pool.free_blocks(borrowed.handles)


def block_hasher(request: Any) -> Callable[[Any], list[Any]] | None:
    """The function that hashes a request's new full blocks; ``None`` where vLLM hashes nothing."""
    hasher: Callable[[Any], list[Any]] | None = request._block_hasher
    return hasher


def set_block_hasher(request: Any, hasher: Callable[[Any], list[Any]]) -> None:
    """Have a request's new full blocks hashed by ``hasher``."""
    request._block_hasher = hasher


def count_cached_tokens(request: Any, local: int, reused: int) -> None:
    """Have vLLM report ``local`` tokens from its prefix cache and ``reused`` ones from ours as cached. By itself it
    would count everything the worker brings, also what the worker has just computed."""
    stats = request.prefill_stats
    if stats is not None and request.num_preemptions == 0:
        stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=local,
            num_external_cached_tokens=reused,
        )


def do_before_forward(output: Any) -> None:
    """Have the workers do what ``output``, a ``SchedulerOutput``, has for the connector before its forward. Newer
    releases do it afterwards where no request of the step waits for it."""
    if hasattr(output, "has_sync_kv_loads"):
        output.has_sync_kv_loads = True
