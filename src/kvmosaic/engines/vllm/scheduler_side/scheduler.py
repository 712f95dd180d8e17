"""Scheduler side: which requests have chunks, what to wait for, how many tokens the worker loads."""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from kvmosaic.core.admin_key import AdminKey
from kvmosaic.core.limits import shown_id
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.compat.scheduling import FreeBlocks, Step, count_cached_tokens, take_parameters
from kvmosaic.engines.vllm.messages import StepReport, StepWork
from kvmosaic.engines.vllm.parameters import RequestParameters
from kvmosaic.engines.vllm.scheduler_side.adapters import KnownAdapters
from kvmosaic.engines.vllm.scheduler_side.admission import Admission
from kvmosaic.engines.vllm.scheduler_side.backlog import FillBacklog
from kvmosaic.engines.vllm.scheduler_side.block_salts import BlockSalt, BlockSalts, keep_to_itself, weights_salt
from kvmosaic.engines.vllm.scheduler_side.block_tables import BlockTables
from kvmosaic.engines.vllm.scheduler_side.exact_prefix import ExactPrefixes
from kvmosaic.engines.vllm.scheduler_side.lending import BlockLender
from kvmosaic.engines.vllm.scheduler_side.loads import Loads
from kvmosaic.engines.vllm.scheduler_side.patience import patience_for
from kvmosaic.engines.vllm.scheduler_side.planner import Planner
from kvmosaic.engines.vllm.scheduler_side.prefix import PrefixScheduler
from kvmosaic.engines.vllm.scheduler_side.report import Reports, choice_report, plain_chunks, reuse_report
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.running import RunningRequests
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.scheduler_side.waiting import WaitingRoom
from kvmosaic.engines.vllm.setup import EngineSetup
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats

logger = logging.getLogger(__name__)


class ChunkScheduler:
    """Follows requests with chunks from their arrival to their end, and tells the workers what to do for them.

    For each request, vLLM calls ``add``, ``matched_tokens`` (until it returns a number), ``allocated``, both of them
    again after a preemption, and ``finished``. It calls ``take_work`` once in every step."""

    def __init__(self, setup: EngineSetup) -> None:
        config, shape = setup.config, setup.shape
        self._config = config
        key = AdminKey.from_environment() if config.chunk_page else None
        self._page_pass = None if key is None else key.page_pass
        self._shape = shape
        has_remote, has_disk = config.remote is not None, config.disk_path is not None
        self._mirror = StoreMirror(shape.ranks, has_remote=has_remote, has_disk=has_disk)
        self._planner = Planner(config, setup.parser, setup.sink, shape, self._mirror, setup.discovery())
        self._admission = Admission(config, shape, self._mirror)
        self._backlog = FillBacklog(shape)
        self._waiting = WaitingRoom(config, shape, self._mirror, self._admission, self._backlog)
        self._adapters = KnownAdapters(shape.ranks)
        self._tables = BlockTables(shape.block_size)
        patience = partial(patience_for, admission=self._admission)
        self.prefixes = PrefixScheduler(config, self._mirror, shape, patience)
        self._pool: FreeBlocks | None = None
        self._lender: BlockLender | None = None
        self._exact: ExactPrefixes | None = None
        self._requests: dict[str, ChunkRequest] = {}
        self._running = RunningRequests(shape.stages)
        self._salt: BlockSalt | None = None  # for all requests that arrive after weights changed
        self._work = StepWork(engine_id=setup.engine_id)
        self.stats = ChunkStats()
        self._reports = Reports(self.stats)
        self._loads = Loads(shape, self._admission, self.stats)

    def bind(self, pool: FreeBlocks) -> None:
        """Set the ``pool`` from which blocks are borrowed. vLLM creates it after the connector."""
        self._pool = pool
        pool.before_reset(lambda: self._backlog.let_go(pool))
        self._exact = ExactPrefixes(self._shape, self._admission, pool)
        self._lender = BlockLender(self._config, self._shape, self._mirror, pool)

    def add(self, request: Any) -> None:
        """Parse a new request. Its block hashes are salted from its first block with chunk tokens on. Once weights
        have changed, all of them are salted, because vLLM's prefix cache may still have KV of the old weights."""
        try:
            self._add(request)
        except Exception:
            logger.exception("request %s cannot be read", shown_id(request.request_id))
            self.stats.failed("schedule")
            self.give_up(request)

    def _add(self, request: Any) -> None:
        for salt in (self._salt, self._adapters.add(request)):
            if salt is not None:
                BlockSalts(request).add([salt])
        sent = take_parameters(request)
        self._plan(request, RequestParameters.read(sent, self._config.allowed_parameters, self._page_pass))

    def _plan(self, request: Any, params: RequestParameters) -> None:
        planned, absent, to_fill = self._planner.plan(request, params, self._adapters.of(request))
        if params.report:
            self._reports.begin(request.request_id, documents_not_found=absent, unknown_parameters=params.unknown)
        if isinstance(planned, ChunkRequest):
            planned = self._mirror.off_reason or planned
        if isinstance(planned, ChunkRequest):
            self._requests[request.request_id] = planned
            planned.block_salts = BlockSalts(request)
            planned.salt_blocks(self._shape)
            enough = self._exact.enough(planned, request.block_hashes) if self._exact else 0
            if enough and planned.block_salts.take_back(0):
                planned.plain_because, planned.plain_tokens = Fallback.PREFIX_CACHED, enough
            if self._config.miss_policy != "never":
                self._backlog.add(chunk for chunk in to_fill if self._mirror.can_store(len(chunk.tokens)))
            return
        if planned is Fallback.LORA:
            self._adapters.plan_later(request, params)
        elif planned is not None:
            self._reports.fall_back(request.request_id, planned)
        else:
            self.stats.count("requests", "plain")
        self.prefixes.add(request)

    def matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Number of tokens after the first ``local`` that the worker loads, and whether the load takes several steps.
        It ends at the question, or at the prompt's last token. The number is ``None`` while the request waits, for
        example for slower tiers."""
        ours = self._requests.get(request.request_id)
        try:
            return self._matched_tokens(request, local)
        except Exception:
            if ours is None and self.prefixes.begins_inside(request, local):
                raise  # vLLM alone cannot continue from there
            logger.exception("request %s cannot be planned", shown_id(request.request_id))
            self.stats.failed("schedule")
        if ours is not None and ours.begins_inside(local):  # then the rest has to be loaded as it was before
            ours.is_long, ours.load_end = False, max(local, ours.prompt.question.start)
            return ours.load_end - local, False
        self.give_up(request)
        return 0, False

    def _matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        params = self._adapters.take_planned(request)
        if params is not None:
            self._plan(request, params)
            if request.request_id in self._requests:
                return None, False  # ``local`` was found by hashes without salts
        ours = self._requests.get(request.request_id)
        if ours is None:
            is_alone = not self._running
            return self.prefixes.matched(request, local, self._work, is_alone=is_alone), False
        if ours.plain_because is not None and (local < ours.plain_tokens or ours.is_stale):
            ours.salt_blocks(self._shape)  # the blocks were evicted since it arrived, or their weights were replaced
            return None, False
        ours.is_alone = not self._running
        matched = ours.plain_because or self._waiting.matched(ours, local, self._work)
        if isinstance(matched, Fallback):
            return self._serve_plainly(request, ours, local, matched), False
        # An adapter may not be active before its request's own step.
        may_be_long = bool(matched) and ours.adapter is None
        ours.is_long = may_be_long and self._admission.is_long(ours, local)
        return matched, ours.is_long

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """The request got its blocks. Its load is done in the coming step, or begins there."""
        ours = self._requests.get(request.request_id)
        if ours is not None and ours.plain_because is not None:
            self._leave(ours, ours.plain_local, ours.plain_because)
            ours = None
        if ours is None:
            if self._adapters.stays_unknown(request):
                self._reports.fall_back(request.request_id, Fallback.LORA)
            self.prefixes.allocated(request, blocks, num_external, self._work)
            return
        if ours.is_in_slices:
            assert not num_external
            ours.is_in_slices = False
            return  # all slices are done, and these blocks are for the question
        local = ours.load_end - num_external
        assert self._lender is not None
        fills = False
        if num_external:  # first of all: from here on, vLLM relies on the load
            ids = tuple(tuple(group) for group in blocks.get_block_ids())
            # A salt or an adapter sets a prompt's tokens apart from the same tokens of others.
            is_findable = request.cache_salt is None and request.lora_request is None and not ours.is_stale
            told = {"is_findable": is_findable, "is_reported": request.request_id in self._reports}
            load = self._loads.begin(ours, local, ids, self._lender, **told)
            self._work.loads.append(load)
            fills = load.fill
        elif ours.has_fetched:
            self._work.released.append(ours.request_id)
        with self.stats.doing_without("a request's report"):
            ours.report = reuse_report(ours, local, self._mirror, "filled" if fills else "prefilled")
            if request.num_preemptions == 0:
                self.stats.count("requests", ours.report["mode"])
            if num_external:  # otherwise vLLM's own count is right
                count_cached_tokens(request, local, ours.report["reused_tokens"])
        ours.reset_after_alloc()

    def take_work(self, step: Step) -> StepWork:
        """The workers' part of ``step``, which is being planned."""
        assert self._pool is not None
        assert self._lender is not None
        self._tables.follow(step)
        self._running.follow(step)
        with self.stats.doing_without("filling in the background"):
            dropped = self._backlog.use_adapters(self._adapters.in_step(step), self._pool)
            if dropped:
                self.stats.count("dropped_fills", "", dropped)
            self._work.fills, self._work.fill_slice = self._backlog.take(
                step,
                self._pool,
                self._admission.tokens_to_fill(step.total_tokens),
                pass_tokens=self._admission.pass_tokens,
                is_full=bool(self._loads.in_slices),
                others_run=bool(self._running),
                requests_wait=bool(self._requests),
            )
        self._lender.take_back()
        self._work.slice_tokens = self._loads.begin_step(step.total_tokens)
        with self.stats.doing_without("saving prefixes"):
            self._work.prefix_saves = self.prefixes.due(step, self._tables)
        work, self._work = self._work, StepWork(engine_id=self._work.engine_id, weights=self._work.weights)
        self._tables.start_early(step, work)
        return work

    def features_of(self, request_id: str) -> Sequence[Any]:
        """vLLM's records of the images, and other inputs than text, of a request with chunks."""
        return self._requests[request_id].features if request_id in self._requests else ()

    def empty_memory(self) -> None:
        """Have the workers forget all entries in memory. vLLM also asks for this when it goes to sleep."""
        self._mirror.clear()
        if self._pool is not None:
            self._backlog.clear(self._pool)
        for request in self._requests.values():
            request.lacking = None  # those that wait for chunks have them queued again
        self.prefixes.clear()
        self._work.empties_memory = True

    def update(self, report: StepReport) -> None:
        """Process the workers' report."""
        latest = max(report.ranks, key=lambda rank: rank.weights)
        if latest.weights > self._work.weights:
            self._change_weights(latest.weights, latest.weights_digest)
        for rank in report.ranks:
            self._mirror.update(rank)
            self._adapters.update(rank.rank, rank.adapters)
            with self.stats.doing_without("learning costs"):
                self._admission.measured(rank.rank, rank.costs)
            for request_id, not_brought in rank.fetched.items():
                self.prefixes.fetched(rank.rank, request_id)
                if request_id in self._requests:  # of other chunks, it was not known whether they are stored
                    stored = frozenset(filter(self._mirror.has, not_brought))
                    self._requests[request_id].arrived(rank.rank, stored, rank.sources)
            for request_id, recomputed in rank.recomputed.items():
                ours = self._requests.get(request_id)
                if ours is not None and ours.report:
                    ours.report |= choice_report(recomputed)
            self._backlog.ended(rank.ended_fills)
            if rank.is_off:
                self.prefixes.turn_off()  # the code that failed also moves prefixes
        if self._mirror.off_reason is not None and self._pool is not None:
            self._backlog.clear(self._pool)
        with self.stats.doing_without("announcing prefixes"):
            self.prefixes.changed({digest for rank in report.ranks for digest in rank.changes})

    def _change_weights(self, changes: int, digest: str) -> None:
        """Weights have changed, for the ``changes``-th time. Current requests may have KV of the old ones."""
        self._work.weights = changes
        self._salt = weights_salt(changes, digest)
        if self._pool is not None:
            self._backlog.let_go(self._pool)  # the computed part of a long chunk is of the old weights
        for request in self._requests.values():
            request.is_stale = True
        self.prefixes.change_weights()

    def loaded(self, request_ids: Iterable[str]) -> None:
        """All slices of these requests are loaded, so they can continue."""
        self._loads.done(request_ids)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request finished or was aborted. Returns the report on its chunks, if it asked for one."""
        self._running.finished(request.request_id)
        if not self._running and self._pool is not None:
            # There may be no further step, and vLLM expects all blocks to be free.
            self._backlog.let_go(self._pool)
        self._adapters.finished(request.request_id)
        ours = self._requests.pop(request.request_id, None)
        if ours is not None and ours.has_fetched:
            self._work.released.append(request.request_id)
        with self.stats.doing_without("saving a prefix"):
            self.prefixes.finished(request, self._tables, self._work)
        return self._reports.take(request.request_id, {} if ours is None else ours.report)

    def give_up(self, request: Any) -> None:
        """Serve a request as plain vLLM would, because something failed. The request has no blocks yet."""
        name = request.request_id
        self._requests.pop(name, None)
        self.prefixes.forget(name)
        keep_to_itself(request, None if self._shape.window_tail is None else 0)
        self._work.fetches = [fetch for fetch in self._work.fetches if fetch.request_id != name]
        self._work.released.append(name)
        self._reports.fall_back(name, Fallback.ERROR)

    def _serve_plainly(self, request: Any, ours: ChunkRequest, local: int, reason: Fallback) -> int | None:
        """Serve a request with chunks as plain vLLM would: the worker loads 0 tokens. If its blocks can be those of
        the plain prompt, others may find them, and it may find others: ``None`` has vLLM look again."""
        assert ours.block_salts is not None
        assert self._exact is not None
        if ours.plain_because is None:
            # The KV may be of weights that were replaced: vLLM does not name blocks by the weights of an adapter.
            is_current = ours.adapter is None and not ours.is_stale
            if not (is_current and ours.block_salts.take_back(local // self._shape.hash_block_size)):
                keep_to_itself(request, ours.first_cut_block(self._shape))
            elif self._exact.has_more(request.block_hashes, local):
                ours.plain_because, ours.plain_tokens = reason, 0
                return None
            self._leave(ours, local, reason)
            return 0
        if reason is Fallback.PREFIX_CACHED:
            self._waiting.fill_missing(ours)
        ours.plain_local = local
        return 0  # it is left to vLLM once it has blocks: until then, the prefix cache may evict those that it finds

    def _leave(self, ours: ChunkRequest, local: int, reason: Fallback) -> None:
        """Leave a request with chunks to vLLM, whose prefix cache has its first ``local`` tokens."""
        del self._requests[ours.request_id]
        if ours.has_fetched:
            self._work.released.append(ours.request_id)
        self._reports.fall_back(ours.request_id, reason)
        if self._mirror.off_reason is None:  # otherwise no chunk was looked up
            looked_for = {digest: len(span) for span, digest in ours.chunks_from(local)}
            self._work.missed += [chunk for chunk in looked_for.items() if not self._mirror.has(chunk[0])]
            if ours.request_id in self._reports:
                self._reports.add(ours.request_id, chunks=plain_chunks(ours, local, self._mirror, reason))
