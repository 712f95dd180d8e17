"""vLLM's own scheduler and our connector, with workers whose KV cache holds labels instead of KV.

The label of a slot is the hash of all tokens up to its own and, where chunks were reused, of everything else that the
KV depends on. A reader of a slot knows the expected label. So an error is noticed at once if a block is read before
it is written, is written while another request needs it, or is found by a request that it was not made for.
"""

import json
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvmosaic.blend import policy_named
from kvmosaic.core.config import load_config
from kvmosaic.core.key import content_hash
from kvmosaic.engines.vllm.arguments import engine_arguments
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.messages import (
    ChunkLoad,
    FillSlice,
    Line,
    PrefixLoad,
    PrefixSave,
    RankReport,
    StepReport,
    StepWork,
)
from kvmosaic.engines.vllm.shape import EngineShape
from kvmosaic.engines.vllm.worker_side.slices import Slices
from tests.engines.vllm.scheduler_side.fakes import BLOCK, STEP
from tests.engines.vllm.scheduler_side.prefixes import prefix_digests

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
}


@lru_cache(maxsize=1)
def _vllm_config() -> VllmConfig:
    """The configuration that vLLM makes for a model that is only a ``config.json``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA))
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK,
            max_num_batched_tokens=STEP,
            max_num_seqs=8,
            max_model_len=2048,
            enable_prefix_caching=True,
            **engine_arguments(load_config(enable_chunk_cache=True)),
        )
        return arguments.create_engine_config()


def make_scheduler(*, blocks: int, ranks: int, window: int | None, is_async: bool, **settings: Any) -> Scheduler:
    """vLLM's scheduler with our connector, for a model that is never loaded."""
    config = _vllm_config()
    usual = {"sink_prefix": "bos", "miss_policy": "background", "client_parameters": "all"}
    chunks = load_config(enable_chunk_cache=True, **usual | settings)
    config.kv_transfer_config.kv_connector_extra_config = chunks.model_dump(mode="json")
    config.parallel_config.tensor_parallel_size = ranks
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = blocks + 1  # one is never handed out
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=window
    )
    caches = KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
    kind = AsyncScheduler if is_async else Scheduler
    return kind(config, caches, StructuredOutputManager(config), BLOCK)


@dataclass
class _Stream:
    """A request as the workers know it."""

    labels: np.ndarray
    """Labels of the tokens of its prompt and answer, ``[tokens]`` int64."""
    length: int
    """Number of tokens so far."""


def _chain(tokens: Sequence[int]) -> np.ndarray:
    labels, before = [], 0
    for token in tokens:
        before = hash((before, token))
        labels.append(before)
    return np.array(labels, dtype=np.int64)


def answer_token(position: int) -> int:
    """The token that every request generates at a position."""
    return 700_000 + position


@dataclass
class Workers:
    """All ranks: one KV cache, one store, and the pending reports of each rank."""

    shape: EngineShape
    blocks: int
    ranks: int
    window: int | None
    """Number of tokens that a token sees in layers with a sliding window, including itself."""
    chance: random.Random
    streams: dict[str, _Stream] = field(default_factory=dict)
    store: dict[bytes, str] = field(default_factory=dict)
    news: list[dict[bytes, str | None]] = field(default_factory=list)
    ended_fills: list[set[bytes]] = field(default_factory=list)
    fetching: list[dict[str, int]] = field(default_factory=list)
    """By rank: requests whose fetch takes more steps."""
    pinned: set[str] = field(default_factory=set)
    """Requests for which entries were fetched and not released yet."""
    costs: dict[str, Line] = field(default_factory=dict)
    salts: set[bytes] = field(default_factory=set)
    """Salts of requests that have one."""
    slices: Slices = field(default_factory=Slices)
    filling: list[int] = field(default_factory=list)
    """Computed labels of a chunk that is filled in slices."""
    fill_slices: int = 0
    loads: int = 0
    prefix_loads: int = 0
    saves: int = 0

    def __post_init__(self) -> None:
        self.memory = np.full((self.blocks + 1) * BLOCK, -1, dtype=np.int64)
        self.windowed = self.memory.copy()
        """Labels in layers with a sliding window, where loads do not write slots that no later token sees."""
        self.news = [{} for _ in range(self.ranks)]
        self.ended_fills = [set() for _ in range(self.ranks)]
        self.fetching = [{} for _ in range(self.ranks)]
        self._loading: dict[str, ChunkLoad] = {}
        self._unlisted: set[int] = set()
        """Ranks whose next report lists all entries."""

    # --- the cache

    def _slots(self, blocks: Sequence[int], start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        return np.asarray(blocks, dtype=np.int64)[positions // BLOCK] * BLOCK + positions % BLOCK

    def _read(self, what: str, labels: np.ndarray, blocks: Sequence[int], end: int, is_whole: bool = True) -> None:
        """Check the slots that a token at position ``end`` sees: all before it, and in layers with a window only the
        window. Not ``is_whole``: the tokens may be a placed chunk, which sees nothing."""
        slots = self._slots(blocks, 0, end)
        wrong = np.flatnonzero(self.memory[slots] != labels[:end])
        assert not wrong.size, (
            f"{what}: other KV than expected at {wrong[0]} of {end}, block {blocks[wrong[0] // BLOCK]}"
        )
        seen = slice(max(0, end - self.window + 1), end) if self.window and is_whole else slice(0)
        lacking = np.flatnonzero(self.windowed[slots[seen]] != labels[seen])
        assert not lacking.size, (
            f"{what}: position {end} sees {seen.start + lacking[0]}, whose layers with a window lack it"
        )

    def _write(self, labels: np.ndarray, blocks: Sequence[int], start: int, end: int) -> None:
        slots = self._slots(blocks, start, end)
        self.memory[slots] = self.windowed[slots] = labels[start:end]

    def _scribble(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with labels that nothing may read."""
        for block in blocks:
            slots = slice(block * BLOCK, (block + 1) * BLOCK)
            self.memory[slots] = self.windowed[slots] = -2

    # --- the store

    def put(self, digest: bytes, tier: str | None) -> None:
        if tier is None:
            self.store.pop(digest, None)
        else:
            self.store[digest] = tier
        for news in self.news:
            news[digest] = tier

    # --- requests

    def add(self, request: Request, *, is_plain: bool) -> None:
        tokens = list(request.prompt_token_ids)
        answers = [answer_token(position) for position in range(len(tokens), len(tokens) + request.max_tokens)]
        labels = _chain([*tokens, *answers])
        if request.cache_salt is not None:
            self.salts.add(request.cache_salt.encode())
        params = request.kv_transfer_params or {}
        spans = [tuple(span) for span in params.get("boundaries", [])[1:-1]]
        if spans and not is_plain and params["recompute_ratio"] < 1:
            self._relabel(labels, tokens, spans, params["recompute_ratio"], params["policy"])
        self.streams[request.request_id] = _Stream(labels, len(tokens))

    def serve_plainly(self, request: Request) -> None:
        """The request finds and makes blocks of the plain prompt from now on."""
        stream = self.streams[request.request_id]
        tokens = list(request.prompt_token_ids)
        answers = [answer_token(position) for position in range(len(tokens), len(stream.labels))]
        stream.labels[:] = _chain([*tokens, *answers])

    def _relabel(
        self, labels: np.ndarray, tokens: list[int], spans: list[tuple[int, int]], ratio: float, policy: str
    ) -> None:
        """KV depends on where earlier chunks begin and end; inside a chunk that is cut, on the whole chunk; and if
        the policy looks at the prompt, on the whole prompt, because this conversation has one turn."""
        made: Any = (ratio, policy if ratio else None)
        if ratio and policy_named(policy).reads_content:
            made = (made, tuple(tokens[spans[0][0] :]))
        begins, ends = dict(spans), {end for _, end in spans}
        for position in range(spans[0][0], len(labels)):
            if position in ends:
                made = hash((made, "end", position))
            if position in begins:
                chunk = tuple(tokens[position : begins[position]])
                made = hash((made, "begin", position, chunk if self.shape.is_cut(len(chunk)) else None))
            labels[position] = hash((made, int(labels[position])))

    # --- a step

    def execute(self, output: SchedulerOutput, tables: dict[str, list[int]]) -> ModelRunnerOutput:
        """``tables``: the blocks of all requests that have any."""
        work = output.kv_connector_metadata
        assert isinstance(work, StepWork)
        self._step(work, tables)
        sampled = self._forward(output, tables)
        done = self.slices.take_done(output.finished_req_ids)
        for name in done:
            self._loading.pop(name, None)
        report = StepReport([self._report(rank) for rank in range(self.ranks)])
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=KVConnectorOutput(finished_recving=done or None, kv_connector_worker_meta=report),
        )

    def _step(self, work: StepWork, tables: dict[str, list[int]]) -> None:
        """Do a step's work in the order of ``WorkerSide.step``."""
        if work.empties_memory:
            for digest, tier in list(self.store.items()):
                self.put(digest, tier if tier == "disk" else None)
            self._unlisted = set(range(self.ranks))
        for save in work.prefix_saves:
            self._save(save)
        self.pinned.difference_update(work.released)
        for fetch in work.fetches:
            self.pinned.add(fetch.request_id)
            for rank in range(self.ranks):
                self.fetching[rank][fetch.request_id] = self.chance.randrange(3)
            for digest, _ in fetch.chunks:
                if digest in self.store:
                    self.put(digest, "host")
        for prefix in work.prefix_loads:
            assert prefix.blocks == (tuple(tables[prefix.request_id]),)
            self._load_prefix(prefix)
            self.pinned.discard(prefix.request_id)
        for runs in self.slices.go_on(work.slice_tokens):
            self._compute(runs)
        for load in work.loads:
            assert load.blocks == (tuple(tables[load.request_id]),)
            self._load(load, tables, work.slice_tokens)
            self.pinned.discard(load.request_id)
        if work.fill_slice is not None:
            self._fill_slice(work.fill_slice, tables)
        for fill in work.fills:
            self._borrow(fill.blocks[0], tables)
            for digest, tokens in fill.chunks:
                self._filled(digest, tokens, fill.context)

    def _filled(self, digest: bytes, tokens: Sequence[int], context: Sequence[int]) -> None:
        plain = content_hash(tokens, context)
        assert digest in {plain, *(sha256(salt + plain).digest()[: len(plain)] for salt in self.salts)}
        if self.chance.random() < 0.95:  # otherwise the store does not accept it
            self.put(digest, "host")
        for ended in self.ended_fills:
            ended.add(digest)

    def _fill_slice(self, part: FillSlice, tables: dict[str, list[int]]) -> None:
        """Compute a slice as a separate sequence. Each slice finds the labels that earlier ones left."""
        self.fill_slices += 1
        if part.start == 0:
            self.filling = []
        assert len(self.filling) == part.start
        self.filling += part.tokens
        labels, blocks = _chain(self.filling), part.blocks[0]
        for name, table in tables.items():
            assert not set(blocks) & set(table), f"{name} has blocks that are lent"
        self._read("slice of a fill", labels, blocks, part.start)
        self._write(labels, blocks, part.start, len(self.filling))
        if part.is_last:
            self._filled(part.digest, self.filling[part.context_tokens :], self.filling[: part.context_tokens])

    def _borrow(self, blocks: Sequence[int], tables: dict[str, list[int]]) -> None:
        assert len(set(blocks)) == len(blocks)
        for name, table in tables.items():
            assert not set(blocks) & set(table), f"{name} has blocks that are lent"
        self._scribble(blocks)

    def _load(self, load: ChunkLoad, tables: dict[str, list[int]], slice_tokens: int) -> None:
        self.loads += 1
        stream, blocks, end = self.streams[load.request_id], load.blocks[0], load.end
        assert load.start % BLOCK == 0
        assert load.start <= load.shared_until
        self._borrow(load.spare, tables)
        if load.fill:
            self._scribble(blocks[load.shared_until // BLOCK :])
            for digest in load.digests:
                self.put(digest, "host")
        start, is_computed = self._begin(load)
        self._read(f"load of {load.request_id}", stream.labels, blocks, start, is_whole=is_computed)
        run = Run(range(start, end), start, load.blocks)
        self._loading[load.request_id] = load
        if not load.is_sliced:
            self._write_load(load, start, end)
            del self._loading[load.request_id]
            return
        self._compute(self.slices.begin(load.request_id, [run], None if load.writes_shared else slice_tokens))

    def _begin(self, load: ChunkLoad) -> tuple[int, bool]:
        """Position where a load begins to write, and whether its first token is computed. vLLM's prefix cache may
        have the beginning of a chunk that is cut. Then the rest is placed, or the whole chunk is computed."""
        for span, digest in zip(load.prompt.chunks, load.digests, strict=True):
            if span.start < load.start < span.end and self.shape.is_cut(len(span)):
                if digest not in self.store:
                    return span.start, True
                return load.start, load.ratio == 1
        return load.start, True

    def _compute(self, runs: Sequence[Run]) -> None:
        for run in runs:
            [name] = [name for name, load in self._loading.items() if load.blocks is run.blocks]
            self._read(f"slice of {name}", self.streams[name].labels, run.blocks[0], run.start, is_whole=False)
            self._write_load(self._loading[name], run.start, run.end)

    def _write_load(self, load: ChunkLoad, start: int, end: int) -> None:
        """Write a load. Layers with a window get only the ends of placed chunks."""
        labels, blocks = self.streams[load.request_id].labels, load.blocks[0]
        before = self.windowed.copy()
        self._write(labels, blocks, start, end)
        for span, digest in zip(load.prompt.chunks, load.digests, strict=True):
            first, last = max(start, span.start), min(end, self._kept_from(span.start, len(span)))
            if digest in self.store and load.ratio < 1 and first < last:
                left = self._slots(blocks, first, last)
                self.windowed[left] = before[left]

    def _load_prefix(self, load: PrefixLoad) -> None:
        self.prefix_loads += 1
        labels, blocks, end, size = _chain(load.tokens), load.blocks[0], len(load.tokens), load.segment_tokens
        assert end % size == 0
        assert list(load.digests) == prefix_digests(load.tokens, size)
        wanted = range(load.start // size, end // size)
        if not all(load.digests[index] in self.store for index in wanted):
            first = load.start // size * size if self.shape.is_cut(size) else load.start
            self._read(f"prefix of {load.request_id}", labels, blocks, first)
            self._write(labels, blocks, first, end)
            return
        self.memory[self._slots(blocks, load.start, end)] = labels[load.start : end]
        for index in wanted:
            begin = max(load.start, self._kept_from(index * size, size))
            self.windowed[self._slots(blocks, begin, (index + 1) * size)] = labels[begin : (index + 1) * size]

    def _kept_from(self, start: int, size: int) -> int:
        """First token of a segment that layers with a window keep."""
        return start + size - self.shape.window_tail if self.shape.is_cut(size) else start

    def _save(self, save: PrefixSave) -> None:
        self.saves += 1
        labels, digests = _chain(save.tokens), prefix_digests(save.tokens, save.segment_tokens)
        for start, digest in save.segments:
            end = start + save.segment_tokens
            assert digest == digests[start // save.segment_tokens]
            slots = self._slots(save.blocks, start, end)
            assert (self.memory[slots] == labels[start:end]).all(), f"segment at {start}: its blocks hold other KV"
            kept = self._kept_from(start, save.segment_tokens)
            assert (self.windowed[slots[kept - start :]] == labels[kept:end]).all(), (
                f"segment at {start}: lacks its end"
            )
            self.put(digest, "host")

    def _forward(self, output: SchedulerOutput, tables: dict[str, list[int]]) -> dict[str, list[int]]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for name, count in output.num_scheduled_tokens.items():  # all tokens are written before any is read
            self._write(self.streams[name].labels, tables[name], computed[name], computed[name] + count)
        for name, count in output.num_scheduled_tokens.items():
            stream = self.streams[name]
            self._read(f"forward of {name}", stream.labels, tables[name], computed[name])
            is_all = computed[name] + count == stream.length
            sampled[name] = [answer_token(stream.length)] if is_all else []
            stream.length += is_all
        return sampled

    def _report(self, rank: int) -> RankReport:
        waiting = self.fetching[rank]
        fetched = [name for name, steps in waiting.items() if steps == 0]
        self.fetching[rank] = {name: steps - 1 for name, steps in waiting.items() if steps}
        changes, self.news[rank] = self.news[rank], {}
        ended, self.ended_fills[rank] = frozenset(self.ended_fills[rank]), set()
        is_all = rank in self._unlisted
        self._unlisted.discard(rank)
        return RankReport(
            rank=rank,
            fastest="host",
            changes=dict(self.store) if is_all else changes,
            fetched=dict.fromkeys(fetched, frozenset()),
            costs=dict(self.costs),
            is_off=False,
            ended_fills=ended,
            is_all=is_all,
        )


class Simulation:
    """One engine without a model."""

    def __init__(
        self,
        *,
        blocks: int = 60,
        ranks: int = 1,
        window: int | None = None,
        is_async: bool = False,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.vllm = make_scheduler(blocks=blocks, ranks=ranks, window=window, is_async=is_async, **settings)
        self.ours = self.vllm.connector.scheduler
        self.pool = self.vllm.kv_cache_manager.block_pool
        self.blocks = blocks
        self.workers = Workers(self.ours._shape, blocks, ranks, window, random.Random(seed))
        leave = self.ours._leave

        def leave_to_vllm(ours: Any, local: int, reason: Any) -> None:
            leave(ours, local, reason)
            request = self.requests[ours.request_id]
            if request.block_hashes == ours.block_salts.plain:
                self.workers.serve_plainly(request)

        self.ours._leave = leave_to_vllm
        self._ahead = int(is_async)
        self._pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.reports: dict[str, dict[str, Any]] = {}
        """Reports to finished requests."""
        self.requests: dict[str, Request] = {}
        self.history: deque[str] = deque(maxlen=40)
        """Records of the latest steps, to find the cause of a failure."""

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.vllm.add_request(request)
        self.workers.add(request, is_plain=request.request_id not in self.ours._requests)
        return request

    def abort(self, name: str) -> None:
        self.vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        output = self.vllm.schedule()
        manager = self.vllm.kv_cache_manager
        tables = {name: manager.get_block_ids(name)[0] for name in self.vllm.requests}
        work = output.kv_connector_metadata
        loads = [(each.request_id, each.start, each.blocks) for each in (*work.prefix_loads, *work.loads)]
        self.history.append(f"{output.num_scheduled_tokens} loads {loads} tables {tables}")
        self._pending.append((output, self.workers.execute(output, {n: t for n, t in tables.items() if t})))
        while len(self._pending) > (self._ahead if output.num_scheduled_tokens else 0):
            for outputs in self.vllm.update_from_output(*self._pending.popleft()).values():
                for each in outputs.outputs:
                    if each.finish_reason is not None:
                        self.reports[each.request_id] = each.kv_transfer_params
        return output

    def finish(self, limit: int = 1000) -> None:
        """Step until all requests are answered, and a few more times, so that workers learn of the end."""
        for _ in range(limit):
            if not self.vllm.has_unfinished_requests():
                break
            self.step()
        assert not self.vllm.has_unfinished_requests(), "it never ends"
        for _ in range(6):
            self.step()

    def check_that_nothing_is_left(self) -> None:
        ours = self.ours
        assert not self.vllm.requests
        assert self.pool.get_num_free_blocks() == self.blocks
        for kept in (ours._requests, ours._reports._told, ours._reports._notes, ours._running, ours._loads.in_slices):
            assert not kept
        assert not ours.prefixes._requests
        assert not ours.prefixes._finished
        assert not ours._tables._tables
        assert not self.workers.pinned
        assert not self.workers.slices
        for request in self.requests.values():
            if request.status != RequestStatus.FINISHED_ABORTED:
                assert request.num_output_tokens == request.max_tokens
