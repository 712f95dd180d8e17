"""vLLM's scheduler: steps, free blocks, block hashes, events."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as event_hash

__all__ = [
    "HIDDEN",
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
    "hashes_of_blocks",
    "hide_events",
    "set_block_hasher",
    "take_parameters",
]

HIDDEN = b"\xf3kvm"
"""Suffix of block hashes that are left out of vLLM's events. Events may carry only the last 8 bytes of a hash."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as the scheduler planned it: the parts of a ``SchedulerOutput`` that we need."""

    scheduled: dict[str, int] = field(default_factory=dict)
    """Number of tokens that the forward computes, by request."""
    computed: dict[str, int] = field(default_factory=dict)
    """Number of tokens that were computed or loaded before, by scheduled request."""
    new: frozenset[str] = frozenset()
    """Requests that start in this step."""
    resumed: frozenset[str] = frozenset()
    """Requests that resume after a preemption."""
    blocks: dict[str, list[int]] = field(default_factory=dict)
    """Block ids that requests got: all blocks of those that start or resume, additional blocks of the others."""
    finished: frozenset[str] = frozenset()
    """Requests that ended since the previous step."""
    drafted: int = 0
    """Number of scheduled tokens that are drafts of a speculative decoder."""

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
            drafted=sum(map(len, output.scheduled_spec_decode_tokens.values())),
        )

    @property
    def total_tokens(self) -> int:
        return sum(self.scheduled.values())

    @property
    def only_decodes(self) -> bool:
        """Whether no prompt is computed."""
        # The rest of a prompt may be a single token, if vLLM's prefix cache has all others.
        begins = self.new or self.resumed
        return not begins and self.total_tokens - self.drafted <= len(self.scheduled)


class Borrowed(NamedTuple):
    """Blocks borrowed from vLLM's pool."""

    ids: tuple[int, ...]
    handles: list[Any]
    """The pool's own block objects, which it takes back."""


class FreeBlocks:
    """vLLM's pool of blocks, from which a step may borrow."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def count(self) -> int:
        free: int = self._pool.get_num_free_blocks()
        return free

    def borrow(self, count: int) -> Borrowed:
        """Borrow ``count`` blocks, at most as many as are free."""
        blocks = self._pool.get_new_blocks(count)
        return Borrowed(tuple(block.block_id for block in blocks), blocks)

    def give_back(self, borrowed: Borrowed) -> None:
        """Free borrowed blocks. Their next owner writes to them in a later step."""
        self._pool.free_blocks(borrowed.handles)

    def has_cached(self, block_hash: Any) -> bool:
        """Whether vLLM's prefix cache has the block with this hash."""
        return self._pool.get_cached_block(block_hash, [0]) is not None

    def before_reset(self, let_go: Callable[[], None]) -> None:
        """Call ``let_go`` before vLLM empties its prefix cache, which it refuses to do while any block is in use."""
        reset = self._pool.reset_prefix_cache

        @wraps(reset)
        def reset_prefix_cache() -> bool:
            let_go()
            is_reset: bool = reset()
            return is_reset

        self._pool.reset_prefix_cache = reset_prefix_cache


def hashes_of_blocks(hashes: list[Any], hash_block_size: int, block_size: int) -> Any:
    """A sequence of the hashes of blocks of ``block_size`` tokens, from those of ``hash_block_size`` tokens."""
    return (
        hashes if block_size == hash_block_size else BlockHashListWithBlockSize(hashes, hash_block_size, block_size)
    )


def block_hasher(request: Any) -> Callable[[Any], list[Any]] | None:
    """The function that hashes a request's new full blocks; ``None`` where vLLM hashes nothing."""
    hasher: Callable[[Any], list[Any]] | None = request._block_hasher
    return hasher


def set_block_hasher(request: Any, hasher: Callable[[Any], list[Any]]) -> None:
    """Have a request's new full blocks hashed by ``hasher``."""
    request._block_hasher = hasher


def hide_events(pool: Any) -> None:
    """Keep blocks whose hash ends in :data:`HIDDEN` out of the events of vLLM's block pool: routers would mistake
    them for blocks of a plain prompt."""
    take = pool.take_events

    @wraps(take)
    def take_events() -> list[KVCacheEvent]:
        return [shown for event in take() for shown in _shown(event)]

    pool.take_events = take_events


def _shown(event: KVCacheEvent) -> Iterator[KVCacheEvent]:
    """The event without its hidden blocks: nothing, or one event for each run of visible blocks."""
    if not isinstance(event, BlockRemoved | BlockStored) or not any(map(_is_hidden, event.block_hashes)):
        yield event
        return
    hashes = event.block_hashes
    if isinstance(event, BlockRemoved):
        left = [each for each in hashes if not _is_hidden(each)]
        if left:
            yield msgspec.structs.replace(event, block_hashes=left)
        return
    for is_hidden, run in groupby(range(len(hashes)), lambda index: _is_hidden(hashes[index])):
        indices = list(run)
        first, last = indices[0], indices[-1]
        if not is_hidden:
            yield msgspec.structs.replace(
                event,
                block_hashes=hashes[first : last + 1],
                parent_block_hash=hashes[first - 1] if first else event.parent_block_hash,
                token_ids=event.token_ids[first * event.block_size : (last + 1) * event.block_size],
                extra_keys=None if event.extra_keys is None else event.extra_keys[first : last + 1],
            )


def _is_hidden(block_hash: Any) -> bool:
    if isinstance(block_hash, int):
        block_hash = (block_hash & (2**32 - 1)).to_bytes(4, "big")
    return bool(block_hash.endswith(HIDDEN))


def count_cached_tokens(request: Any, local: int, reused: int) -> None:
    """Have vLLM report ``local`` tokens from its prefix cache and ``reused`` ones from ours as cached. By itself,
    vLLM would count all tokens that the worker loads, including those that the worker has just computed."""
    stats = request.prefill_stats
    if stats is not None and request.num_preemptions == 0:
        stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=local,
            num_external_cached_tokens=reused,
        )


def take_parameters(request: Any) -> object:
    """The ``kv_transfer_params`` that a client sent, which are removed from the request. vLLM accepts any value (as
    ``vllm_xargs``), and looks up keys in it after the connector has seen the request. vLLM would also send the texts
    among them to the workers, and log them if the engine fails."""
    sent: object = request.kv_transfer_params
    request.kv_transfer_params = None
    sampling = request.sampling_params
    if sampling is not None and "kv_transfer_params" in (sampling.extra_args or {}):
        request.sampling_params = copy(sampling)  # the caller's own keep theirs
        rest = {name: value for name, value in sampling.extra_args.items() if name != "kv_transfer_params"}
        request.sampling_params.extra_args = rest or None
    return sent


def do_before_forward(output: Any) -> None:
    """Have the workers run the connector's work in ``output``, a ``SchedulerOutput``, before the forward. Newer
    releases run it after the forward if no request of the step waits for it."""
    if hasattr(output, "has_sync_kv_loads"):
        output.has_sync_kv_loads = True
