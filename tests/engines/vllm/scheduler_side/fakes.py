"""The scheduler side of an engine alone: real requests, a real pool of blocks, and made-up reports of workers."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvmosaic.core.config import load_config
from kvmosaic.core.key import content_hash
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.engines.vllm.compat.scheduling import FreeBlocks, Step
from kvmosaic.engines.vllm.messages import Line, RankReport, StepReport, StepWork
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.scheduler import ChunkScheduler
from kvmosaic.engines.vllm.setup import EngineSetup
from kvmosaic.engines.vllm.shape import EngineShape

BLOCK, STEP, SEGMENT = 16, 64, 64
"""Number of tokens of a block, maximum of a step, and number of an exact prefix entry."""
SINK = (1, 2, 3)
"""Tokens that chunks are computed after."""
MARKER = 4
"""The token between two turns."""

init_none_hash(sha256)  # as engines do when they start
HASHER = get_request_block_hasher(BLOCK, sha256)


def text(number: int, length: int) -> list[int]:
    """Tokens that no other number has."""
    return list(range(1000 * number, 1000 * number + length))


SYSTEM, QUESTION = text(90, 20), text(91, 10)
FIRST, SECOND = text(1, 40), text(2, 40)
"""Two chunks. In ``ask_about(FIRST, SECOND)`` they begin at 20 and 60, and the question at 100."""


def make_shape(**changes: Any) -> EngineShape:
    sizes: dict[str, Any] = {
        "block_size": BLOCK,
        "hash_block_size": BLOCK,
        "ranks": 1,
        "step_tokens": STEP,
        "max_positions": 2048,
        "prefix_cache_tokens": 100_000,
        "num_layers": 4,
        "has_drafts": False,
        "segment_tokens": SEGMENT,
        "window_tail": None,
    }
    return EngineShape(**sizes | changes)


def make_setup(shape: EngineShape, **settings: Any) -> EngineSetup:
    """A setup without a tokenizer, so requests give the positions of their chunks."""
    usual = {"miss_policy": "background", "client_parameters": "all"}
    config = load_config(enable_chunk_cache=True, **usual | settings)
    return EngineSetup(config, ChunkTokenParser(None), None, SINK, shape, "engine", frozenset({MARKER}))


def boundaries_of(parts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    ends = [sum(map(len, parts[: index + 1])) for index in range(len(parts))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def make_request(
    name: str,
    *parts: Sequence[int],
    cache_salt: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    fields: Mapping[str, Any] | None = None,
    **params: Any,
) -> Request:
    """A request as vLLM makes it. With several parts, these are system, chunks and question. ``params`` are its
    ``kv_transfer_params``, ``sampling`` and ``fields`` arguments of vLLM's classes."""
    if len(parts) > 1:
        params = {"boundaries": boundaries_of(parts), **params}
    arguments = {"max_tokens": 100, "ignore_eos": True, **(sampling or {})}
    if params:
        arguments["extra_args"] = {"kv_transfer_params": params}
    tokens = [token for part in parts for token in part]
    rest = {"cache_salt": cache_salt, "block_hasher": HASHER, **(fields or {})}
    return Request(name, tokens, SamplingParams(**arguments), None, **rest)


def ask_about(*chunks: Sequence[int], name: str = "request", **params: Any) -> Request:
    """A request with the usual system prompt and question."""
    return make_request(name, SYSTEM, *chunks, QUESTION, **{"report": True, **params})


def digest_of(tokens: Sequence[int], context: Sequence[int] = SINK) -> bytes:
    return content_hash(tokens, context)


class Side:
    """A ``ChunkScheduler`` with settings, called as vLLM calls it."""

    def __init__(
        self, *, shape: Mapping[str, Any] | None = None, blocks: int = 200, is_known: bool = True, **settings: Any
    ) -> None:
        """``is_known``: whether all ranks have already reported that they have stored nothing."""
        self.setup = make_setup(make_shape(**(shape or {})), **settings)
        self.scheduler = ChunkScheduler(self.setup)
        self.pool = BlockPool(blocks + 1, enable_caching=False, hash_block_size=BLOCK)  # one is never handed out
        self.scheduler.bind(FreeBlocks(self.pool))
        if is_known:
            self.report()

    # --- the workers

    def report(
        self,
        changes: Mapping[bytes, str | None] | None = None,
        *,
        rank: int | None = None,
        fetched: Sequence[str] = (),
        not_brought: Mapping[str, frozenset[bytes]] | None = None,
        costs: Mapping[str, Line] | None = None,
        is_off: bool = False,
        **more: Any,
    ) -> None:
        """Process the report of one rank, or of every rank, after a step. ``not_brought``: what was not brought by
        fetches that are done, by request."""
        ranks = range(self.setup.shape.ranks) if rank is None else [rank]
        reports = [
            RankReport(
                rank=each,
                fastest="host",
                changes=dict(changes or {}),
                fetched={name: frozenset() for name in fetched} | dict(not_brought or {}),
                costs=dict(costs or {}),
                is_off=is_off,
                **more,
            )
            for each in ranks
        ]
        self.scheduler.update(StepReport(reports))

    def store(self, *chunks: Sequence[int], tier: str | None = "host", rank: int | None = None) -> None:
        """Report that chunks are now in a tier."""
        self.report({digest_of(chunk): tier for chunk in chunks}, rank=rank)

    # --- vLLM's scheduler

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        return request

    def ask(self, request: Request, local: int = 0) -> tuple[int | None, bool]:
        """Number of tokens that the workers load, and whether that takes several steps."""
        return self.scheduler.matched_tokens(request, local)

    def matched(self, request: Request, local: int = 0) -> int | None:
        return self.ask(request, local)[0]

    def give(self, request: Request, external: int, local: int = 0, more: int = 0) -> list[int]:
        """Give the request blocks for the tokens in vLLM's prefix cache, for those that workers load, and for some
        more."""
        handles = self.pool.get_new_blocks(-(-(local + external + more) // BLOCK))
        self.scheduler.allocated(request, KVCacheBlocks((handles,)), external)
        return [block.block_id for block in handles]

    def begin(self, request: Request, local: int = 0, more: int = 0) -> tuple[int, list[int]]:
        """Ask about the request and give it the blocks that it needs. Returns the number of tokens that workers load,
        and the blocks."""
        external = self.matched(request, local)
        assert external is not None
        return external, self.give(request, external, local, more)

    def step(self, **fields: Any) -> StepWork:
        """The workers' part of a step, by default of one that computes nothing."""
        return self.scheduler.take_work(Step(**fields))

    def run(self, name: str = "other", tokens: int = 1, computed: int = 0) -> StepWork:
        """Run a step in which one request continues, so that it is running."""
        return self.step(scheduled={name: tokens}, computed={name: computed})

    # --- observable results

    def counts(self, name: str) -> dict[str, int]:
        counted: dict[str, int] = self.scheduler.stats.data["counts"].get(name, {})
        return counted

    def ours(self, request: Request) -> ChunkRequest:
        return self.scheduler._requests[request.request_id]

    def is_forgotten(self, request: Request) -> bool:
        scheduler, name = self.scheduler, request.request_id
        kept = (
            scheduler._requests,
            scheduler._reports,
            scheduler._reports._notes,
            *scheduler._running._steps,
            scheduler._loads.in_slices,
            scheduler.prefixes._requests,
            scheduler._adapters._of,
            scheduler._adapters._unplanned,
        )
        return not any(name in each for each in kept)
