"""Scheduler side of exact prefix blocks: which segments of plain requests to load from the store, and which to save
to it.

A segment is an entry like a chunk's. Its context is the whole prompt before it. Its KV was computed by vLLM itself,
and keeps its position. Requests with blended chunks have no segments, because their KV is an approximation."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from struct import unpack
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.key import EXACT, content_hash
from kvmosaic.engines.vllm.compat.scheduling import KVCacheEvent, Step
from kvmosaic.engines.vllm.messages import ChunkFetch, PrefixLoad, PrefixSave, StepWork
from kvmosaic.engines.vllm.scheduler_side.block_salts import BlockSalt, BlockSalts
from kvmosaic.engines.vllm.scheduler_side.block_tables import BlockTables
from kvmosaic.engines.vllm.scheduler_side.prefix_events import EventGroup, PrefixEvents
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.shape import EngineShape

REMEMBERED = 65536
"""Maximum number of segments that are remembered as incomplete in vLLM's blocks."""
ROUNDED = -1
"""Stand-in for what precedes a prompt whose segments are read from a quantised cache. It is not a valid token id, so
no document has the hash of such a segment: moved to another position, its KV would be rounded twice."""


@dataclass
class _Exact:
    """A request whose KV is all computed by vLLM."""

    request: Any
    digests: list[bytes] = field(default_factory=list)
    """Content hashes of its segments, as far as they were computed."""
    saved: int = 0
    """Number of segments that are in the store or on their way there."""
    end: int = 0
    """Position up to which the worker loads its tokens, as vLLM was told last."""
    waiting_for: set[int] | None = None
    """Ranks that have yet to fetch its segments; ``None`` before any was asked to."""
    deadline: float = 0.0
    """When to stop waiting; 0 before it waits."""
    is_stale: bool = False
    """Whether weights changed since it arrived, so that its KV must not be saved."""
    salts: BlockSalts | None = None
    cut_from: dict[int, int] = field(default_factory=dict)
    """By segment: the token at which its blocks in vLLM's prefix cache begin to be incomplete. They lack KV that
    tokens inside the segment see in layers with a sliding window."""


class PrefixScheduler:
    """Plans loads and saves of exact prefix blocks. Without ``prefix_blocks`` it accepts no requests, and does
    nothing."""

    def __init__(
        self, config: ChunkCacheConfig, mirror: StoreMirror, shape: EngineShape, patience: Callable[[int], float]
    ) -> None:
        """``patience``: seconds that a request waits for a number of tokens in slower tiers."""
        self._mirror = mirror
        self._shape = shape
        self._patience = patience
        self._algorithm = config.chunk_hash_algorithm
        self._mark = EXACT if config.entry_dtype == "int8" else b""
        """Bytes that ranks add to the content hashes of segments in their reports."""
        self._is_on = config.prefix_blocks
        self._segment = shape.segment_tokens
        self._cut: OrderedDict[bytes, None] = OrderedDict()
        """Segments that were loaded into vLLM's blocks without their first tokens in layers with a sliding window."""
        self._requests: dict[str, _Exact] = {}
        self._finished: list[PrefixSave] = []
        self._events: PrefixEvents | None = None

    def announce(self, groups: Sequence[EventGroup]) -> None:
        """Make events for segments that are stored from now on."""
        self._events = PrefixEvents(self._mirror.has, self._shape, groups)

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        return [] if self._events is None else self._events.take()

    def changed(self, digests: Collection[bytes]) -> None:
        """Ranks reported changes of entries with these content hashes."""
        if self._events is not None:
            self._events.update(digests)

    def turn_off(self) -> None:
        """Stop loading and saving."""
        self._is_on = False
        self._requests.clear()
        self._finished.clear()

    def add(self, request: Any) -> None:
        """Add a request, if its KV will be exact. Requests with an adapter, embeddings, images or a salt are left
        out, because their token ids do not identify their prompts."""
        plain = not (request.lora_request or request.prompt_embeds is not None or request.mm_features)
        if (
            self._is_on
            and plain
            and request.prompt_token_ids
            and request.pooling_params is None
            and request.cache_salt is None
        ):
            exact = self._requests[request.request_id] = _Exact(request)
            for index in range((request.num_tokens - 1) // self._segment if self._cut else 0):
                if self._digest(exact, index) in self._cut:
                    self._cut.move_to_end(exact.digests[index])
                    self._salt(exact, index, index * self._segment)

    def matched(self, request: Any, local: int, work: StepWork, *, is_alone: bool) -> int | None:
        """Number of tokens after the first ``local`` that the store has; ``None`` while they are being fetched from
        slower tiers. ``is_alone``: no other request is running."""
        exact = self._requests.get(request.request_id)
        if exact is None or request.skip_reading_prefix_cache:
            return 0
        exact.deadline = exact.deadline or time.monotonic() + self._patience(0)  # for ranks to list their entries
        if exact.waiting_for is None and self._mirror.is_complete:
            # Other engines may have stored segments in the meantime that this one does not know of.
            is_shared = self._mirror.may_lag_behind_others(is_alone=is_alone)
            end = request.num_tokens - 1 if is_shared else self._stored_until(exact, local)
            digests = [self._digest(exact, index) for index in range(local // self._segment, end // self._segment)]
            slow = [digest for digest in digests if not self._mirror.is_near(digest + self._mark)]
            exact.waiting_for = set(range(self._shape.ranks)) if slow else set()
            if slow:
                pairs = tuple((digest, self._segment) for digest in slow)
                work.fetches.append(ChunkFetch(request_id=request.request_id, chunks=pairs, is_exact=True))
                exact.deadline = time.monotonic() + self._patience(len(slow) * self._segment)
        index = local // self._segment
        # In that case vLLM alone cannot continue from here. The worker computes the segment if the store lacks it.
        exact.end = (index + 1) * self._segment if self.begins_inside(request, local) else local
        if exact.waiting_for is None or exact.waiting_for:
            if time.monotonic() < exact.deadline:
                return None
        else:
            exact.end = max(exact.end, self._stored_until(exact, local))
        if self._shape.is_cut(self._segment):
            for each in range(index, exact.end // self._segment):
                self._salt(exact, each, max(local, each * self._segment))
        return exact.end - local

    def begins_inside(self, request: Any, local: int) -> bool:
        """Whether the first ``local`` tokens of a request end where layers with a sliding window lack KV of earlier
        tokens."""
        exact = self._requests.get(request.request_id)
        return exact is not None and local > exact.cut_from.get(local // self._segment, local)

    def forget(self, request_id: str) -> None:
        """Stop following a request."""
        self._requests.pop(request_id, None)

    def allocated(self, request: Any, blocks: Any, num_external: int, work: StepWork) -> None:
        """The request got its blocks. The coming step loads the tokens that vLLM was told of."""
        exact = self._requests.get(request.request_id)
        if exact is None:
            return
        if num_external:
            count = exact.end // self._segment
            exact.saved = max(exact.saved, count)
            start = exact.end - num_external
            work.prefix_loads.append(
                PrefixLoad(
                    request_id=request.request_id,
                    tokens=tuple(request.all_token_ids[: exact.end]),
                    digests=tuple(exact.digests[:count]),
                    segment_tokens=self._segment,
                    start=start,
                    blocks=tuple(tuple(group) for group in blocks.get_block_ids()),
                )
            )
            for index in range(start // self._segment, count):  # maybe stored by an engine that announced nothing
                self._expect(exact, index)
        elif exact.waiting_for is not None:
            work.released.append(request.request_id)
        exact.waiting_for, exact.deadline = None, 0.0  # if it is preempted and resumes, it asks again

    def due(self, step: Step, tables: BlockTables) -> list[PrefixSave]:
        """Segments to save that requests computed in earlier steps and that are not stored yet."""
        saves, self._finished = self._finished, []
        if not self._requests:
            return saves
        for request_id, computed in tables.running_before(step).items():
            exact = self._requests.get(request_id)
            if exact is not None:
                saves += self._complete(exact, computed, tables.blocks(request_id))
        return saves

    def fetched(self, rank: int, request_id: str) -> None:
        """A rank has fetched the segments that a request waits for, or failed to."""
        exact = self._requests.get(request_id)
        if exact is not None and exact.waiting_for:
            exact.waiting_for.discard(rank)

    def finished(self, request: Any, tables: BlockTables, work: StepWork) -> None:
        """The request finished. Its blocks are free, but nothing is written to them before the next step, which saves
        them first."""
        exact = self._requests.pop(request.request_id, None)
        if exact is None:
            return
        if exact.waiting_for is not None:
            work.released.append(request.request_id)
        self._finished += self._complete(exact, request.num_computed_tokens, tables.blocks(request.request_id))

    def clear(self) -> None:
        """The workers empty their memory. Segments of running requests are saved again."""
        self._finished.clear()
        if self._events is not None:
            self._events.clear()
        for exact in self._requests.values():
            exact.saved = 0

    def change_weights(self) -> None:
        """Stored segments are useless with the new weights, and KV of running requests must not be saved."""
        self._finished.clear()
        if self._events is not None:
            self._events.clear()
        for exact in self._requests.values():
            exact.is_stale = True

    def _stored_until(self, exact: _Exact, local: int) -> int:
        """Position up to which the store has the request's tokens without a gap, leaving at least one token to
        compute."""
        index = local // self._segment
        while (index + 1) * self._segment < exact.request.num_tokens and self._has(self._digest(exact, index)):
            index += 1
        return index * self._segment

    def _complete(self, exact: _Exact, computed: int, blocks: Sequence[int]) -> list[PrefixSave]:
        """Segments to save of the first ``computed`` tokens, in one message for all segments."""
        if exact.is_stale or self._mirror.off_reason is not None:
            return []
        tokens = exact.request.all_token_ids
        limit = exact.request.num_prompt_tokens if self._shape.has_drafts else len(tokens)
        ready = min(computed, limit) // self._segment
        segments = [(index * self._segment, self._digest(exact, index)) for index in range(exact.saved, ready)]
        for index in range(exact.saved, ready):
            self._expect(exact, index)
        exact.saved = max(exact.saved, ready)
        missing = tuple(each for each in segments if not self._has(each[1]))
        if not missing:
            return []
        end = missing[-1][0] + self._segment
        return [
            PrefixSave(
                tokens=tuple(tokens[:end]), segments=missing, segment_tokens=self._segment, blocks=tuple(blocks)
            )
        ]

    def _expect(self, exact: _Exact, index: int) -> None:
        """Have a segment announced once it is stored."""
        if self._events is not None:
            request = exact.request
            hashes = request.block_hashes if exact.salts is None else exact.salts.plain
            name = exact.digests[index] + self._mark
            self._events.expect(name, index * self._segment, request.all_token_ids, hashes)

    def _has(self, digest: bytes) -> bool:
        """Whether every rank has a segment."""
        return self._mirror.has(digest + self._mark)

    def _digest(self, exact: _Exact, index: int) -> bytes:
        """Content hash of a segment, chained to the hash of the segment before it. Hashing the whole prompt before
        each segment would keep the scheduler busy for seconds with a long prompt. Entries that are found by the hash
        are still compared token by token."""
        tokens = exact.request.all_token_ids
        while len(exact.digests) <= index:
            start = len(exact.digests) * self._segment
            first = (ROUNDED,) if self._shape.is_quantised else ()
            before = unpack("<4i", exact.digests[-1]) if exact.digests else first
            exact.digests.append(content_hash(tokens[start : start + self._segment], before, self._algorithm))
        return exact.digests[index]

    def _salt(self, exact: _Exact, index: int, start: int) -> None:
        """Restrict a segment's blocks from token ``start`` on to prompts with the whole segment. Otherwise vLLM would
        give the first blocks to prompts that continue differently, and their tokens would need KV that was not
        loaded."""
        # A preempted request may find fewer tokens in vLLM's cache when it resumes.
        end = exact.cut_from.get(index, (index + 1) * self._segment)
        if start >= end:
            return
        digest = self._digest(exact, index)
        exact.salts = exact.salts or BlockSalts(exact.request)
        size = self._shape.hash_block_size
        exact.salts.add([BlockSalt(hashlib.sha256(digest).digest(), start // size, end // size)])
        exact.cut_from[index] = start
        self._cut[digest] = None
        while len(self._cut) > REMEMBERED:
            self._cut.popitem(last=False)
