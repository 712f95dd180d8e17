"""Scheduler side of exact prefix blocks: which parts of plain requests to load from the store, which to save to it.

A part is an entry like a chunk's, with the whole prompt before it as its context: KV that vLLM itself computed, kept
where it was. Requests with blended chunks have none of their own; their KV is an approximation."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import unpack
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.key import content_hash
from kvmosaic.engines.vllm.compat import BlockSalts
from kvmosaic.engines.vllm.messages import ChunkFetch, PrefixLoad, PrefixSave, StepWork
from kvmosaic.engines.vllm.scheduler_side.block_tables import BlockTables
from kvmosaic.engines.vllm.scheduler_side.prefix_events import EventGroup, PrefixEvents
from kvmosaic.engines.vllm.scheduler_side.store_mirror import ChunkCatalog

PART_TOKENS = 256
"""About how many tokens are one entry: enough to move well, few enough that little of a prompt is left over."""


MOST_PART_TOKENS = 2048
"""As large as a part may be made so that layers with a sliding window can leave some of it out."""
REMEMBERED = 65536
"""So many parts are known to stand in vLLM's blocks with something left out."""


def part_tokens(reach: int | None) -> int:
    """Tokens of a part, of which only the last ``reach`` are needed in layers with a sliding window: twice as many,
    or nothing is saved. The same where they are all kept, so that what is found does not depend on what is kept."""
    return PART_TOKENS if reach is None or 2 * reach > MOST_PART_TOKENS else max(PART_TOKENS, 2 * reach)


@dataclass
class _Exact:
    """A request all of whose KV is what vLLM computes."""

    request: Any
    digests: list[bytes] = field(default_factory=list)
    """Content hash of each part so far."""
    saved: int = 0
    """Parts that are in the store or on their way there."""
    end: int = 0
    """Where what the store has of it ends, as vLLM was told last."""
    waiting_for: set[int] | None = None
    """Ranks that have yet to fetch; ``None`` before anybody was asked to."""
    deadline: float = 0.0
    """When to stop waiting; 0 before it waits."""
    salts: BlockSalts | None = None
    cut_from: dict[int, int] = field(default_factory=dict)
    """By part: the token from whose block on its blocks, where vLLM's prefix cache has them, lack what tokens inside
    the part see in layers with a sliding window."""


class PrefixScheduler:
    """Plans loads and saves of exact prefix blocks."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        catalog: ChunkCatalog,
        block_size: int,
        hash_block_size: int,
        ranks: int,
        patience: float,
        drafts: bool,
        part: int,
        tail: int | None,
    ) -> None:
        """``tail``: so many tokens of a part are kept in layers with a sliding window; ``None``: all."""
        self._catalog = catalog
        self._algorithm = config.chunk_hash_algorithm
        self._is_pool_shared = config.remote is not None
        self.part = -(-part // block_size) * block_size
        self._is_cut = tail is not None and tail < self.part
        self._hash_block_size = hash_block_size
        self._cut: OrderedDict[bytes, None] = OrderedDict()
        """Parts that were brought to vLLM's blocks without the beginning of their sliding windows' layers."""
        self._ranks = ranks
        self._patience = patience
        self._drafts = drafts
        """Whether tokens are computed that may turn out never to have been said."""
        self._requests: dict[str, _Exact] = {}
        self._finished: list[PrefixSave] = []
        self.events: PrefixEvents | None = None

    def announce(self, block_size: int, groups: Sequence[EventGroup]) -> PrefixEvents:
        """Have events made of what is stored from now on."""
        self.events = PrefixEvents(self._has, self.part, block_size, self._hash_block_size, groups)
        return self.events

    def add(self, request: Any) -> None:
        """A request whose KV will be exact. One with an adapter, embeddings, images or a salt has prompts that its
        token ids do not tell apart."""
        plain = not (request.lora_request or request.prompt_embeds is not None or request.mm_features)
        if plain and request.prompt_token_ids and request.pooling_params is None and request.cache_salt is None:
            exact = self._requests[request.request_id] = _Exact(request)
            for index in range((request.num_tokens - 1) // self.part if self._cut else 0):
                if self._digest(exact, index) in self._cut:
                    self._cut.move_to_end(exact.digests[index])
                    self._salt(exact, index, index * self.part)

    def matched(self, request: Any, num_local: int, work: StepWork) -> int | None:
        """Tokens after the first ``num_local`` that the store has; ``None`` while they are on their way from slower
        tiers."""
        exact = self._requests.get(request.request_id)
        if exact is None or request.skip_reading_prefix_cache:
            return 0
        exact.deadline = exact.deadline or time.monotonic() + self._patience
        if exact.waiting_for is None and self._catalog.complete:
            # Other engines may have stored in the meantime what this one never heard of.
            end = request.num_tokens - 1 if self._is_pool_shared else self._stored_until(exact, num_local)
            digests = [self._digest(exact, index) for index in range(num_local // self.part, end // self.part)]
            slow = [digest for digest in digests if not self._is_near(digest)]
            exact.waiting_for = set(range(self._ranks)) if slow else set()
            if slow:
                work.fetches.append(ChunkFetch(request.request_id, tuple((digest, self.part) for digest in slow)))
        index = num_local // self.part
        # Then vLLM cannot go on from here by itself; what the store lacks of the part, the worker computes.
        begins_inside = num_local > exact.cut_from.get(index, num_local)
        exact.end = (index + 1) * self.part if begins_inside else num_local
        if exact.waiting_for is None or exact.waiting_for:
            if time.monotonic() < exact.deadline:
                return None
        else:
            exact.end = max(exact.end, self._stored_until(exact, num_local))
        if self._is_cut:
            for part in range(index, exact.end // self.part):
                self._salt(exact, part, max(num_local, part * self.part))
        return exact.end - num_local

    def allocated(self, request: Any, blocks: Any, num_external: int, work: StepWork) -> None:
        """The request got its blocks: have loaded in the coming step what vLLM was told there is."""
        exact = self._requests.get(request.request_id)
        if exact is None:
            return
        if num_external:
            count = exact.end // self.part
            exact.saved = max(exact.saved, count)
            load = PrefixLoad(
                request.request_id,
                tuple(request.all_token_ids[: exact.end]),
                tuple(exact.digests[:count]),
                self.part,
                exact.end - num_external,
                tuple(tuple(group) for group in blocks.get_block_ids()),
            )
            work.prefix_loads.append(load)
            for index in range(load.first // self.part, count):  # maybe stored by an engine that announced nothing
                self._expect(exact, index)
        elif exact.waiting_for is not None:
            work.released.append(request.request_id)
        exact.waiting_for, exact.deadline = None, 0.0  # if it is preempted and comes back, it asks anew

    def due(self, step: Any, tables: BlockTables) -> list[PrefixSave]:
        """What requests computed in earlier steps, and nobody stored yet."""
        saves, self._finished = self._finished, []
        for request_id, computed in tables.running_before(step).items():
            exact = self._requests.get(request_id)
            if exact is not None:
                saves += self._complete(exact, computed, tables.blocks(request_id))
        return saves

    def fetched(self, rank: int, request_id: str) -> None:
        """A rank has brought what a request waits for, or could not."""
        exact = self._requests.get(request_id)
        if exact is not None and exact.waiting_for:
            exact.waiting_for.discard(rank)

    def finished(self, request: Any, tables: BlockTables, work: StepWork) -> None:
        """The request is over. Its blocks are free, but nobody writes to them before the next step, which saves them
        first."""
        exact = self._requests.pop(request.request_id, None)
        if exact is None:
            return
        if exact.waiting_for is not None:
            work.released.append(request.request_id)
        self._finished += self._complete(exact, request.num_computed_tokens, tables.blocks(request.request_id))

    def clear(self) -> None:
        """The workers forget everything; what runs is saved anew."""
        self._finished.clear()
        if self.events is not None:
            self.events.clear()
        for exact in self._requests.values():
            exact.saved = 0

    def _stored_until(self, exact: _Exact, num_local: int) -> int:
        """How far the store has the request's tokens without a gap, leaving at least one to compute."""
        index = num_local // self.part
        while (index + 1) * self.part < exact.request.num_tokens and self._has(self._digest(exact, index)):
            index += 1
        return index * self.part

    def _complete(self, exact: _Exact, computed: int, blocks: Sequence[int]) -> list[PrefixSave]:
        """What is to be saved of the first ``computed`` tokens, in one message for all parts."""
        tokens = exact.request.all_token_ids
        limit = exact.request.num_prompt_tokens if self._drafts else len(tokens)
        ready = min(computed, limit) // self.part
        parts = [(index * self.part, self._digest(exact, index)) for index in range(exact.saved, ready)]
        for index in range(exact.saved, ready):
            self._expect(exact, index)
        exact.saved = max(exact.saved, ready)
        missing = tuple(part for part in parts if not self._has(part[1]))
        if not missing:
            return []
        end = missing[-1][0] + self.part
        return [PrefixSave(tuple(tokens[:end]), missing, self.part, tuple(blocks))]

    def _expect(self, exact: _Exact, index: int) -> None:
        """Have a part announced once it is stored."""
        if self.events is not None:
            request = exact.request
            hashes = request.block_hashes if exact.salts is None else exact.salts.plain
            self.events.expect(exact.digests[index], index * self.part, request.all_token_ids, hashes)

    def _digest(self, exact: _Exact, index: int) -> bytes:
        """Content hash of a part, chained to the one before it: to hash all that precedes it for every part of a long
        prompt would keep the scheduler busy for seconds. What is found by it is still compared token by token."""
        tokens = exact.request.all_token_ids
        while len(exact.digests) <= index:
            start = len(exact.digests) * self.part
            before = unpack("<4i", exact.digests[-1]) if exact.digests else ()
            exact.digests.append(content_hash(tokens[start : start + self.part], before, self._algorithm))
        return exact.digests[index]

    def _salt(self, exact: _Exact, index: int, start: int) -> None:
        """Keep a part's blocks from token ``start`` on for prompts that have all of the part. vLLM would otherwise
        hand the first of them to prompts that go on differently, which look back at what was not brought."""
        # A request that was preempted may find less in vLLM's cache when it comes back.
        end = exact.cut_from.get(index, (index + 1) * self.part)
        if start >= end:
            return
        digest = self._digest(exact, index)
        exact.salts = exact.salts or BlockSalts(exact.request)
        exact.salts.add(digest, start // self._hash_block_size, end // self._hash_block_size)
        exact.cut_from[index] = start
        self._cut[digest] = None
        while len(self._cut) > REMEMBERED:
            self._cut.popitem(last=False)

    def _has(self, digest: bytes) -> bool:
        return self._catalog.tier(digest) is not None

    def _is_near(self, digest: bytes) -> bool:
        tier = self._catalog.tier(digest)
        return tier is not None and self._catalog.is_fastest(tier)
