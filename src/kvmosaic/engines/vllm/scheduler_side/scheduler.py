"""Scheduler side: which requests have chunks, what to wait for, how many tokens the worker brings."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from kvmosaic.blend.base import PROBE_TOKENS
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.results import ChunkReport
from kvmosaic.engines.vllm.compat import BlockSalts, count_cached_tokens
from kvmosaic.engines.vllm.messages import ChunkFetch, ChunkLoad, PrefixLoad, StepReport, StepWork
from kvmosaic.engines.vllm.scheduler_side.backlog import FillBacklog
from kvmosaic.engines.vllm.scheduler_side.block_tables import BlockTables
from kvmosaic.engines.vllm.scheduler_side.planner import Plan, Planner
from kvmosaic.engines.vllm.scheduler_side.prefix import PrefixScheduler
from kvmosaic.engines.vllm.scheduler_side.prefix_events import EventGroup, PrefixEvents
from kvmosaic.engines.vllm.scheduler_side.store_mirror import ChunkCatalog
from kvmosaic.engines.vllm.telemetry.cost import Judge, Line
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats

logger = logging.getLogger(__name__)

Load = TypeVar("Load", ChunkLoad, PrefixLoad)

PATIENCE_SECONDS = 30
"""How long a request waits for chunks in slower tiers before it is served without them."""


class ChunkScheduler:
    """Plans requests. Holds a plan only while its request waits or runs."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        parser: ChunkTokenParser,
        sink: tuple[int, ...],
        block_size: int,
        hash_block_size: int,
        ranks: int,
        engine_id: str,
        step_tokens: int,
        num_layers: int,
        max_positions: int,
        has_drafts: bool,
        part: int,
        tail: int | None,
    ) -> None:
        """``part``: about so many tokens of an exact prefix are one entry. ``tail``: so many tokens
        of an entry are kept in layers with a sliding window; ``None``: all."""
        self._config = config
        self._planner = Planner(config, parser, sink, num_layers, tail)
        self._block_size = block_size
        self._hash_block_size = hash_block_size
        self._tables = BlockTables(block_size)
        self._ranks = ranks
        self._catalog = ChunkCatalog(ranks)
        self._plans: dict[str, Plan] = {}
        self._fallbacks: dict[str, str] = {}
        """Why requests with chunks are served plainly, while they run."""
        self._engine_id = engine_id
        self._work = StepWork(engine_id)
        self._step_tokens = step_tokens
        self._max_positions = max_positions
        self._tokens_in_step = 0
        """About how many tokens the coming step computes for chunks, beside vLLM's own."""
        self._running: set[str] = set()
        """Requests that were in the latest step and are not finished."""
        self._in_slices: set[str] = set()
        """Requests that are being loaded in several steps."""
        self.pool: Any = None
        """vLLM's pool of blocks, from which a step may borrow."""
        self._borrowed: list[Any] = []
        self._backlog = FillBacklog(config.background_fill_tokens, block_size)
        self._costs: dict[int, dict[str, Line]] = {}
        """What each rank measured."""
        self._judge = Judge()
        self._off = False
        """Whether workers said, with their first step, that nothing may be reused."""
        self.stats = ChunkStats()
        self._prefixes = (
            PrefixScheduler(
                config, self._catalog, block_size, hash_block_size, ranks, PATIENCE_SECONDS, has_drafts, part, tail
            )
            if config.prefix_blocks
            else None
        )

    def announce(self, groups: Sequence[EventGroup]) -> PrefixEvents | None:
        """Have events made of the exact prefix blocks that are stored from now on, if any are."""
        return None if self._prefixes is None else self._prefixes.announce(self._block_size, groups)

    def add(self, request: Any) -> None:
        """Parse a new request. From its first block with chunk tokens on, its block hashes are made its own."""
        plan = self._planner.plan(request)
        if isinstance(plan, Plan) and self._off:
            plan = "self-test"
        if isinstance(plan, str):
            self._fallbacks[request.request_id] = plan
            self.stats.count("fallbacks", plan)
        if not isinstance(plan, Plan):
            self.stats.count("requests", "plain")
            if self._prefixes is not None:
                self._prefixes.add(request)
            return
        self._plans[request.request_id] = plan
        BlockSalts(request).add(plan.salt(), plan.prompt.chunks[0].start // self._hash_block_size)

    def matched_tokens(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """Tokens after the first ``num_local`` that the worker brings: everything up to the question. ``None`` while
        chunks are on their way from slower tiers, so that other requests go on meanwhile. And whether that takes
        several steps, so that others' next tokens do not wait for all of it."""
        matched = self._matched(request, num_local)
        plan = self._plans.get(request.request_id)
        if plan is None:
            return matched, False
        plan.at_once = None
        if not matched:
            return matched, False
        # Asking the question takes about as long as computing so many tokens.
        room = self._step_tokens // 2 if plan.is_probed else self._step_tokens
        is_long = self._cost(plan, num_local) > room and bool(self._running)
        if is_long:
            plan.at_once = room
        return matched, is_long

    def _matched(self, request: Any, num_local: int) -> int | None:
        plan = self._plans.get(request.request_id)
        if plan is None:
            return self._prefixes.matched(request, num_local, self._work) if self._prefixes else 0
        external = max(0, plan.prompt.question.start - num_local)
        if external == 0:
            return 0
        if self._off:
            self._serve_plainly(request, "self-test")
            return 0
        if plan.waiting_for is None and self._catalog.complete and not self._fetch(request, plan, num_local):
            return 0
        if plan.waiting_for is not None and not plan.waiting_for:
            plan.fetched_from |= {digest: "remote" for digest in plan.asked_for if self._catalog.tier(digest)}
            if plan.asked_for and not self._is_worth_it(request, plan, num_local):
                self._work.released.append(request.request_id)
                return 0
            if self._tokens_in_step and self._tokens_in_step + self._cost(plan, num_local) > self._step_tokens:
                return None  # the next step has room: others' decoding must not wait for many blends at once
            return external  # it may still have to wait for blocks, which is nobody's fault
        if plan.deadline is None:
            plan.deadline = time.monotonic() + PATIENCE_SECONDS
        if time.monotonic() < plan.deadline:
            return None
        if self._is_begun(plan, num_local):
            return external
        logger.warning("request %s waited %d s for its chunks; it is prefilled", request.request_id, PATIENCE_SECONDS)
        self._work.released.append(request.request_id)
        self._serve_plainly(request, "slow-tier")
        return 0

    def _fetch(self, request: Any, plan: Plan, local: int) -> bool:
        """Have chunks fetched that are in slower tiers, or may be. ``False`` if the request is served plainly."""
        lengths = dict(zip(plan.digests, map(len, plan.prompt.chunks), strict=True))
        tiers = {
            digest: self._catalog.tier(digest)
            for span, digest in zip(plan.prompt.chunks, plan.digests, strict=True)
            if span.end > local
        }
        # Other engines may have stored in the meantime what this one never heard of.
        plan.asked_for = [digest for digest, tier in tiers.items() if tier is None and self._config.remote]
        if not plan.asked_for and not self._is_worth_it(request, plan, local):
            return False
        slow = {digest: tier for digest, tier in tiers.items() if tier and not self._catalog.is_fastest(tier)}
        plan.fetched_from |= slow
        wanted = tuple((digest, lengths[digest]) for digest in (*slow, *plan.asked_for))
        plan.waiting_for = set(range(self._ranks)) if wanted else set()
        if wanted:
            self._work.fetches.append(ChunkFetch(request.request_id, wanted))
        return True

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """The request got its blocks: have it loaded in the coming step, or from then on."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            if self._prefixes is not None:
                self._prefixes.allocated(request, blocks, num_external, self._work)
            return
        if plan.is_in_slices:
            assert not num_external
            plan.is_in_slices = False
            return  # all of them are done, and these blocks are for the question
        local = plan.prompt.question.start - num_external
        self._account(request, plan, local)
        if num_external:  # else vLLM's own count is right
            count_cached_tokens(request, local, plan.report["reused_tokens"])
            assert local % self._block_size == 0
            ids = tuple(tuple(group) for group in blocks.get_block_ids())
            shared = request.cache_salt is None
            self._work.loads.append(
                ChunkLoad(
                    request.request_id,
                    plan.prompt,
                    plan.digests,
                    plan.ratio,
                    local,
                    ids,
                    shared,
                    plan.policy,
                    self._config.miss_policy == "fill-first",
                    local,
                    self._borrow(plan, local, len(ids[0])),
                    plan.at_once,
                )
            )
            if plan.at_once is not None:
                plan.is_in_slices = True
                self._in_slices.add(request.request_id)
            if plan.predicted is not None:
                self.stats.observe("predicted", plan.predicted)
            self._tokens_in_step += self._cost(plan, local)
        elif plan.waiting_for is not None:
            self._work.released.append(request.request_id)
        plan.is_worth_it = False
        plan.waiting_for = plan.deadline = None  # if it is preempted and comes back, it asks anew

    def take_work(self, step: Any) -> StepWork:
        """The workers' part of ``step``, the ``SchedulerOutput`` being built."""
        self._tables.follow(step)
        self._running = set(step.num_scheduled_tokens)
        self._work.fills = self._backlog.take(step, self.pool)
        if self._borrowed:  # whoever gets them next writes them in a later step
            self.pool.free_blocks(self._borrowed)
        self._borrowed = []
        self._tokens_in_step = self._step_tokens if self._in_slices else 0
        if self._prefixes is not None:
            self._work.prefix_saves = self._prefixes.due(step, self._tables)
        work, self._work = self._work, StepWork(self._engine_id)
        if work.loads or work.prefix_loads:
            unwritten = self._tables.written_by(step)
            work.loads = [self._start_before(unwritten, load).unless_shared() for load in work.loads]
            work.prefix_loads = [self._start_before(unwritten, load) for load in work.prefix_loads]
        return work

    def _cost(self, plan: Plan, local: int) -> int:
        """About how many tokens are computed to bring what follows the first ``local`` tokens."""
        missing = blended = 0
        fills = self._config.miss_policy == "fill-first"
        for span, digest in zip(plan.prompt.chunks, plan.digests, strict=True):
            tokens = max(0, span.end - max(span.start, local))
            is_missing = self._catalog.tier(digest) is None
            missing += tokens if is_missing else 0
            blended += tokens if not is_missing or fills else 0
        context = len(self._planner.context(plan.prompt)) if missing and fills else 0
        return max(0, plan.prompt.system.end - local) + context + missing + int(plan.ratio * blended)

    def _borrow(self, plan: Plan, local: int, owned: int) -> tuple[int, ...]:
        """Blocks for what the ``owned`` ones have no room for: the part of the question that is probed, where the
        step does not compute all of it itself; and, behind its context, the longest chunk that is filled first."""
        probed = filled = 0
        if plan.is_probed:
            question = plan.prompt.question
            probed = self._blocks_for(min(question.end, question.start + PROBE_TOKENS)) - owned
        if self._config.miss_policy == "fill-first":
            lengths = [
                self._filled_length(plan.prompt, span)
                for span, digest in zip(plan.prompt.chunks, plan.digests, strict=True)
                if span.end > local and self._catalog.tier(digest) is None
            ]
            longest = max((length for length in lengths if length <= self._max_positions), default=0)
            filled = self._blocks_for(longest) - (owned - local // self._block_size)
        free = self.pool.get_num_free_blocks()
        lacking = max((count for count in (probed, filled) if count <= free), default=0)
        if lacking <= 0:
            return ()
        blocks = self.pool.get_new_blocks(lacking)
        self._borrowed += blocks
        return tuple(block.block_id for block in blocks)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _filled_length(self, prompt: ChunkedPrompt, chunk: Span) -> int:
        """Tokens that a chunk takes together with what it is computed after."""
        return len(self._planner.context(prompt)) + len(chunk)

    def _start_before(self, unwritten: set[int], load: Load) -> Load:
        """The load, made to compute also what vLLM's prefix cache has in name only until this step's forward."""
        known = load.blocks[0][: load.first // self._block_size]
        written = next((index for index, block in enumerate(known) if block in unwritten), len(known))
        return replace(load, first=written * self._block_size)

    def clear(self) -> None:
        """Have the workers forget all chunks."""
        self._catalog.clear()
        self._backlog.clear()
        if self._prefixes is not None:
            self._prefixes.clear()
        self._work.clear = True

    def update(self, report: StepReport) -> None:
        """Take in what the workers report."""
        for rank in report.ranks:
            self._catalog.update(rank)
            self._off |= rank.off
            self._costs[rank.rank] = rank.costs
            for request_id in rank.fetched:
                if self._prefixes is not None:
                    self._prefixes.fetched(rank.rank, request_id)
                plan = self._plans.get(request_id)
                if plan is not None and plan.waiting_for:
                    plan.waiting_for.discard(rank.rank)
        if self._off:
            self._prefixes = None  # whatever failed, it moves those, too

    def loaded(self, request_ids: Iterable[str]) -> None:
        """These were loaded in slices, and can go on."""
        self._in_slices.difference_update(request_ids)
        if not self._in_slices:
            self._tokens_in_step = 0

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request is over, or was aborted. What happened to its chunks, if it wants to know."""
        self._running.discard(request.request_id)
        plan = self._plans.pop(request.request_id, None)
        if plan is not None and plan.waiting_for is not None:
            self._work.released.append(request.request_id)
        if self._prefixes is not None:
            self._prefixes.finished(request, self._tables, self._work)
        fallback = self._fallbacks.pop(request.request_id, None)
        if (request.kv_transfer_params or {}).get("report") is not True:
            return None
        return (plan and plan.report) or {"mode": "plain", "fallback_reason": fallback}

    def _serve_plainly(self, request: Any, reason: str) -> None:
        """Serve a request with chunks as plain vLLM would."""
        del self._plans[request.request_id]
        self._fallbacks[request.request_id] = reason
        self.stats.count("fallbacks", reason)
        self.stats.count("requests", "plain")

    def _is_worth_it(self, request: Any, plan: Plan, local: int) -> bool:
        """Whether reusing what there is will be faster than a plain prefill; if not, the request gets one. Missing
        chunks are noted, to be filled in the background."""
        if plan.is_worth_it or self._config.miss_policy == "fill-first":
            return True
        if self._config.miss_policy == "background":
            for span, digest in zip(plan.prompt.chunks, plan.digests, strict=True):
                fits = self._filled_length(plan.prompt, span) <= self._max_positions
                if fits and self._catalog.tier(digest) is None:
                    self._backlog.add(digest, plan.prompt.tokens_of(span), self._planner.context(plan.prompt))
        if self._is_begun(plan, local):
            return True
        ahead = plan.prompt.question.start - local
        computed = self._cost(plan, local)
        if all({"blend", "remap"} <= costs.keys() for costs in self._costs.values()):
            plan.predicted = self._seconds("blend", computed) + self._seconds("remap", ahead - computed)
            if plan.is_probed and all("probe" in costs for costs in self._costs.values()):
                plan.predicted += self._seconds("probe", ahead)
            is_faster = computed < ahead and self._judge.is_faster(plan.predicted, self._seconds("blend", ahead))
        else:  # too little was measured yet
            is_faster = computed < ahead
        if not is_faster:
            self._serve_plainly(request, "cost")
        plan.is_worth_it = is_faster
        return is_faster

    def _is_begun(self, plan: Plan, local: int) -> bool:
        """Whether vLLM's prefix cache has tokens of chunks. Reuse may have left them, and then the others have to
        become what they were: a prefill of the rest would give an answer that is neither of the two."""
        return local > plan.prompt.chunks[0].start

    def _seconds(self, stage: str, tokens: int) -> float:
        """What a stage takes on the slowest rank."""
        return max(costs[stage].seconds(tokens) for costs in self._costs.values())

    def _account(self, request: Any, plan: Plan, local: int) -> None:
        """Note what is about to be reused, for the request's report and the metrics."""
        chunks, reused = [], 0.0
        lacking: Literal["filled", "prefilled"] = (
            "filled" if self._config.miss_policy == "fill-first" else "prefilled"
        )
        for span, digest in zip(plan.prompt.chunks, plan.digests, strict=True):
            if span.end <= local:
                chunks.append(ChunkReport(span, "cached", "prefix-cache", None))
                continue
            tier = plan.fetched_from.get(digest) or self._catalog.tier(digest)
            chunks.append(ChunkReport(span, "cached" if tier else lacking, tier, None if tier else "missing"))
            reused += (span.end - max(span.start, local)) * (1 - plan.ratio) if tier else 0
        mode = "fill" if any(chunk.status == "filled" for chunk in chunks) else "reuse"
        if request.num_preemptions == 0:
            self.stats.count("requests", mode)
        plan.report = {
            "mode": mode,
            "prefix_tokens": local,
            "reused_tokens": int(reused),
            "chunks": [chunk.as_dict() for chunk in chunks],
        }
