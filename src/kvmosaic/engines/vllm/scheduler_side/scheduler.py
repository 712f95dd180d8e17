"""Scheduler side: which requests have chunks, what to wait for, how many tokens the worker brings."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.compat.scheduling import FreeBlocks, KVCacheEvent, Step, count_cached_tokens
from kvmosaic.engines.vllm.messages import ChunkFetch, ChunkLoad, PrefixLoad, StepReport, StepWork
from kvmosaic.engines.vllm.scheduler_side.admission import Admission
from kvmosaic.engines.vllm.scheduler_side.backlog import FillBacklog
from kvmosaic.engines.vllm.scheduler_side.block_salts import BlockSalts
from kvmosaic.engines.vllm.scheduler_side.block_tables import BlockTables
from kvmosaic.engines.vllm.scheduler_side.lending import BlockLender
from kvmosaic.engines.vllm.scheduler_side.planner import Planner
from kvmosaic.engines.vllm.scheduler_side.prefix import PrefixScheduler
from kvmosaic.engines.vllm.scheduler_side.prefix_events import EventGroup
from kvmosaic.engines.vllm.scheduler_side.report import reuse_report
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.setup import EngineSetup
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats

logger = logging.getLogger(__name__)

Load = TypeVar("Load", ChunkLoad, PrefixLoad)

PATIENCE_SECONDS = 30
"""Time that a request waits for chunks in slower tiers before it is served without them."""


class ChunkScheduler:
    """Follows requests with chunks from their arrival to their end, and tells the workers what to do for them.

    vLLM calls, in a request's life: ``add``, ``matched_tokens`` (until it says a number), ``allocated``, perhaps both
    again after a preemption, ``finished``; and ``take_work`` once in every step."""

    def __init__(self, setup: EngineSetup) -> None:
        config, shape = setup.config, setup.shape
        self._config = config
        self._shape = shape
        self._engine_id = setup.engine_id
        self._planner = Planner(config, setup.parser, setup.sink, shape)
        self._mirror = StoreMirror(shape.ranks)
        self._admission = Admission(config, shape, self._mirror)
        self._backlog = FillBacklog(shape.block_size)
        self._tables = BlockTables(shape.block_size)
        self._prefixes = PrefixScheduler(config, self._mirror, shape, PATIENCE_SECONDS)
        self._pool: FreeBlocks | None = None
        self._lender: BlockLender | None = None
        self._requests: dict[str, ChunkRequest] = {}
        self._fallbacks: dict[str, Fallback] = {}
        """Why requests with chunks are served plainly, while they run."""
        self._running: set[str] = set()
        """Requests that were in the latest step and are not finished."""
        self._in_slices: set[str] = set()
        """Requests that are being loaded in several steps."""
        self._is_off = False
        """Whether workers said, with their first step, that nothing may be reused."""
        self._work = StepWork(engine_id=setup.engine_id)
        self.stats = ChunkStats()

    def bind(self, pool: FreeBlocks) -> None:
        """Take blocks for single steps from ``pool``. vLLM has it only after it made the connector."""
        self._pool = pool
        self._lender = BlockLender(self._config, self._shape, self._mirror, pool)

    def announce(self, groups: Sequence[EventGroup]) -> None:
        """Have events made of the exact prefix blocks that are stored from now on."""
        self._prefixes.announce(groups)

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        return self._prefixes.take_events()

    def add(self, request: Any) -> None:
        """Parse a new request. From its first block with chunk tokens on, its block hashes are made its own."""
        planned = self._planner.plan(request)
        if isinstance(planned, ChunkRequest) and self._is_off:
            planned = Fallback.SELF_TEST
        if isinstance(planned, ChunkRequest):
            self._requests[request.request_id] = planned
            BlockSalts(request).add(planned.salt(), planned.prompt.chunks[0].start // self._shape.hash_block_size)
            return
        if planned is not None:
            self._fallbacks[request.request_id] = planned
            self.stats.count("fallbacks", planned)
        self.stats.count("requests", "plain")
        self._prefixes.add(request)

    def matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens after the first ``local`` that the worker brings: everything up to the question. ``None`` while
        chunks are on their way from slower tiers, so that other requests go on meanwhile. And whether that takes
        several steps, so that others' next tokens do not wait for all of it."""
        ours = self._requests.get(request.request_id)
        if ours is None:
            return self._prefixes.matched(request, local, self._work), False
        matched = self._matched(ours, local)
        # Alone, it is computed at once.
        ours.at_once = self._admission.first_slice(ours, local) if matched and self._running else None
        return matched, ours.at_once is not None

    def _matched(self, request: ChunkRequest, local: int) -> int | None:
        external = max(0, request.prompt.question.start - local)
        if external == 0:
            return 0
        if self._is_off:
            return self._serve_plainly(request, Fallback.SELF_TEST)
        if not request.has_fetched and self._mirror.is_complete and not self._fetch(request, local):
            return self._serve_plainly(request, Fallback.COST)
        if request.has_arrived:
            request.fetched_from |= {digest: "remote" for digest in request.asked_for if self._mirror.has(digest)}
            if request.asked_for and not self._is_worth_it(request, local):
                return self._serve_plainly(request, Fallback.COST)
            # It may still have to wait for a step with room, and for blocks.
            return external if self._admission.has_room(request, local) else None
        if request.has_patience(PATIENCE_SECONDS):
            return None
        if request.is_begun(local):
            return external
        logger.warning("request %s waited %d s for its chunks; it is prefilled", request.request_id, PATIENCE_SECONDS)
        return self._serve_plainly(request, Fallback.SLOW_TIER)

    def _fetch(self, request: ChunkRequest, local: int) -> bool:
        """Have chunks fetched that are in slower tiers, or may be. ``False`` if a plain prefill is faster."""
        chunks = {digest: len(span) for span, digest in request.chunks_from(local)}
        # Other engines may have stored in the meantime what this one never heard of.
        request.asked_for = [digest for digest in chunks if self._config.remote and not self._mirror.has(digest)]
        if not request.asked_for and not self._is_worth_it(request, local):
            return False
        slow = {digest: self._mirror.tier(digest) for digest in chunks if not self._mirror.is_near(digest)}
        request.fetched_from |= {digest: tier for digest, tier in slow.items() if tier is not None}
        wanted = (*(digest for digest, tier in slow.items() if tier is not None), *request.asked_for)
        request.wait_for(self._shape.ranks if wanted else 0)
        if wanted:
            pairs = tuple((digest, chunks[digest]) for digest in wanted)
            self._work.fetches.append(ChunkFetch(request_id=request.request_id, chunks=pairs))
        return True

    def _is_worth_it(self, request: ChunkRequest, local: int) -> bool:
        """Whether to reuse what there is. Missing chunks are noted, to be filled in the background."""
        if request.is_worth_it or self._config.miss_policy == "fill-first":
            return True
        if self._config.miss_policy == "background":
            for span, digest in zip(request.prompt.chunks, request.digests, strict=True):
                fits = len(request.context) + len(span) <= self._shape.max_positions
                if fits and not self._mirror.has(digest):
                    self._backlog.add(digest, request.prompt.tokens_of(span), request.context)
        if request.is_begun(local):
            return True
        request.is_worth_it = self._admission.is_faster(request, local)
        return request.is_worth_it

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """The request got its blocks: have it loaded in the coming step, or from then on."""
        ours = self._requests.get(request.request_id)
        if ours is None:
            self._prefixes.allocated(request, blocks, num_external, self._work)
            return
        if ours.is_in_slices:
            assert not num_external
            ours.is_in_slices = False
            return  # all of them are done, and these blocks are for the question
        local = ours.prompt.question.start - num_external
        fills = self._config.miss_policy == "fill-first"
        ours.report = reuse_report(ours, local, self._mirror, "filled" if fills else "prefilled")
        if request.num_preemptions == 0:
            self.stats.count("requests", ours.report["mode"])
        if num_external:  # else vLLM's own count is right
            count_cached_tokens(request, local, ours.report["reused_tokens"])
            ids = tuple(tuple(group) for group in blocks.get_block_ids())
            self._load(ours, local, ids, is_findable=request.cache_salt is None)
        elif ours.has_fetched:
            self._work.released.append(ours.request_id)
        ours.reset_after_alloc()

    def _load(
        self, request: ChunkRequest, local: int, ids: tuple[tuple[int, ...], ...], *, is_findable: bool
    ) -> None:
        assert local % self._shape.block_size == 0
        assert self._lender is not None
        self._work.loads.append(
            ChunkLoad(
                request_id=request.request_id,
                prompt=request.prompt,
                digests=request.digests,
                ratio=request.ratio,
                policy=request.policy,
                start=local,
                shared_until=local,
                blocks=ids,
                spare=self._lender.lend(request, local, len(ids[0])),
                is_findable=is_findable,
                fill=self._config.miss_policy == "fill-first",
                at_once=request.at_once,
            )
        )
        if request.at_once is not None:
            request.is_in_slices = True
            self._in_slices.add(request.request_id)
        if request.predicted is not None:
            self.stats.observe("predicted", request.predicted)
        self._admission.admit(request, local)

    def take_work(self, step: Step) -> StepWork:
        """The workers' part of ``step``, which is being planned."""
        assert self._pool is not None
        assert self._lender is not None
        self._tables.follow(step)
        self._running = set(step.scheduled)
        self._work.fills = self._backlog.take(step, self._pool)
        self._lender.take_back()
        self._admission.begin_step(is_full=bool(self._in_slices))
        self._work.prefix_saves = self._prefixes.due(step, self._tables)
        work, self._work = self._work, StepWork(engine_id=self._engine_id)
        if work.loads or work.prefix_loads:
            unwritten = self._tables.written_by(step)
            work.loads = [self._start_before(unwritten, load).unless_shared() for load in work.loads]
            # Workers load prefixes first, so blocks that are loaded with chunks are not there yet, either.
            for load in work.loads:
                unwritten.update(load.blocks[0][load.start // self._shape.block_size :])
            work.prefix_loads = [self._start_before(unwritten, prefix) for prefix in work.prefix_loads]
        return work

    def _start_before(self, unwritten: set[int], load: Load) -> Load:
        """The load, starting early enough to compute blocks that vLLM's prefix cache has in name only: the forward of
        this very step writes them, and ours runs before it."""
        known = load.blocks[0][: load.start // self._shape.block_size]
        written = next((index for index, block in enumerate(known) if block in unwritten), len(known))
        return replace(load, start=written * self._shape.block_size)

    def clear(self) -> None:
        """Have the workers forget all chunks."""
        self._mirror.clear()
        self._backlog.clear()
        self._prefixes.clear()
        self._work.clear = True

    def update(self, report: StepReport) -> None:
        """Take in what the workers report."""
        for rank in report.ranks:
            self._mirror.update(rank)
            self._admission.measured(rank.rank, rank.costs)
            for request_id in rank.fetched:
                self._prefixes.fetched(rank.rank, request_id)
                if request_id in self._requests:
                    self._requests[request_id].arrived(rank.rank)
            if rank.is_off:
                self._is_off = True
                self._prefixes.turn_off()  # what failed moves those, too
        self._prefixes.changed({digest for rank in report.ranks for digest in rank.changes})

    def loaded(self, request_ids: Iterable[str]) -> None:
        """These were loaded in slices, and can go on."""
        self._in_slices.difference_update(request_ids)
        if not self._in_slices:
            self._admission.begin_step(is_full=False)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request is over, or was aborted. What happened to its chunks, if it wants to know."""
        self._running.discard(request.request_id)
        ours = self._requests.pop(request.request_id, None)
        if ours is not None and ours.has_fetched:
            self._work.released.append(request.request_id)
        self._prefixes.finished(request, self._tables, self._work)
        fallback = self._fallbacks.pop(request.request_id, None)
        if (request.kv_transfer_params or {}).get("report") is not True:
            return None
        if ours is not None and ours.report:
            return ours.report
        return {"mode": "plain", "fallback_reason": None if fallback is None else fallback.value}

    def _serve_plainly(self, request: ChunkRequest, reason: Fallback) -> int:
        """Serve a request with chunks as plain vLLM would: the worker brings 0 tokens."""
        del self._requests[request.request_id]
        if request.has_fetched:
            self._work.released.append(request.request_id)
        self._fallbacks[request.request_id] = reason
        self.stats.count("fallbacks", reason)
        self.stats.count("requests", "plain")
        return 0
