"""Worker side: find or fill a request's chunks, remap them into its blocks, compute what is fresh."""

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey, format_fingerprint
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import Span
from kvmosaic.core.window import WindowTails
from kvmosaic.engines.chunk_cache import KV, ChunkCache
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.rotary import ANY_LENGTH, measure_rotary
from kvmosaic.engines.vllm.forward.runs import Row
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.messages import ChunkFill, ChunkLoad, RankReport
from kvmosaic.engines.vllm.paged.base import Part, RequestBlocks
from kvmosaic.engines.vllm.paged.by_backend import BackendBlocks
from kvmosaic.engines.vllm.paged.by_kernel import KernelBlocks
from kvmosaic.engines.vllm.paged.layout_probe import BlockReader
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats, CountName
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.blender import Blender
from kvmosaic.engines.vllm.worker_side.prefix import PrefixLoader
from kvmosaic.engines.vllm.worker_side.slices import Slices
from kvmosaic.store import LookupResult, MissReason

logger = logging.getLogger(__name__)


class _Piece(NamedTuple):
    """A part of a prompt whose KV may be in the store."""

    span: Span
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    key: ChunkKey


class _Brought(NamedTuple):
    """What stands in a request's blocks."""

    spans: list[Span]
    """All of it, ascending."""
    moves: list[tuple[ChunkKV, int]]
    """The chunks among it, and where they stand."""
    new_tail: list[_Piece]
    """The end of the system prompt, if it is still to be computed and stored."""


@dataclass
class _Rest:
    """What is left to compute of a request before its question."""

    rows: list[Row]
    tail: list[_Piece] = field(default_factory=list)
    """The end of the system prompt, to be stored once it is computed; in the first row."""


class ChunkLoader:
    """Brings the KV of requests' chunks into their blocks."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        model: str,
        identity: dict[str, object],
        sink: Sequence[int],
        parser: ChunkTokenParser,
        forward: SparseForward,
        network: torch.nn.Module,
        device_pool: torch.Tensor | None,
        ranks: Ranks,
        max_positions: int,
        num_blocks: int,
        tails: WindowTails,
    ) -> None:
        self._forward = forward
        self._ranks = ranks
        self._scratch: Sequence[Sequence[int]] = [range(1, 9) for _ in forward.block_sizes]  # block 0 is never used
        rotary = self.rotary = measure_rotary(forward, network, self._scratch)
        """How the keys of each layer turn."""
        self._tails = tails
        self._blocks: RequestBlocks = KernelBlocks.open(forward, rotary, tails, ranks) or BackendBlocks(
            forward, rotary, tails, BlockReader.measure(forward, num_blocks) if config.prefix_blocks else None
        )
        self.stats = ChunkStats(rank=ranks.rank)
        self.timer = StageTimer(self.stats, forward.device)
        self._blender = Blender(forward, self._blocks, ranks, self.timer)
        self._fingerprint = format_fingerprint(
            columns=[layer.columns if layer else None for layer in rotary], **identity
        )
        self.cache = ChunkCache(config, model, sink, parser, self, ranks.share, max_positions, device_pool, tails)
        self.prefixes = PrefixLoader(self.cache, self._blocks, ranks, self.timer, self.stats)
        self.slices = Slices()
        """What later steps are to compute."""
        self._counted = self.cache.store.event_counts()
        self.off_reason: str | None = None
        """Why nothing may be reused: the scheduler is told so, and hands out no work."""

    def fingerprint(self, length: int) -> str:
        """The same for every prompt: vLLM's rotary tables do not depend on its length."""
        return self._fingerprint

    def report(self, changes: dict[bytes, str | None], fetched: list[str]) -> RankReport:
        """What the scheduler should know of this rank."""
        lines = {str(stage): cost.line() for stage, cost in self.timer.costs.items()}
        costs = {stage: line for stage, line in lines.items() if line is not None}
        off = self.off_reason is not None
        return RankReport(self._ranks.rank, self.cache.store.fastest_tier, changes, fetched, costs, off)

    def take_stats(self) -> ChunkStats | None:
        """Metrics since the last call, if there are any."""
        self.timer.collect()
        if self.stats.is_empty():
            return None
        counts = self.cache.store.event_counts()
        for event in ("evictions", "write_errors"):
            self.stats.count(event, "", counts[event] - self._counted[event])
        self._counted = counts
        for name, (entries, nbytes) in self.cache.store.held().items():
            self.stats.level("tier_entries", name, entries)
            self.stats.level("tier_bytes", name, nbytes)
        return self.stats.take()

    def clear(self) -> None:
        """Forget all chunks."""
        self.cache.clear()
        self._blender.clear()

    def wait_for_layer(self, name: str) -> None:
        """Have the GPU wait for what is on its way into a layer."""
        arrivals = self._forward.arrivals
        layer = self._forward.index_of.get(name)
        if arrivals is not None and layer is not None:
            arrivals.wait(layer)

    def wait_for_all(self) -> None:
        """Likewise for all layers."""
        if self._forward.arrivals is not None:
            self._forward.arrivals.wait_for_all()

    def load(self, loads: Sequence[ChunkLoad]) -> None:
        """Bring positions ``load.first`` up to the question of each request into its blocks, after another slice of
        what earlier steps left. Whatever goes wrong with a request's chunks, on any rank, it is prefilled as plain
        vLLM would."""
        if not loads and not self.slices:
            return
        with self.timer.stage("load"):
            rests = [_Rest(rows) for rows in self.slices.go_on(self._forward.step_tokens)]
            for load in loads:
                rest = self._assemble(load, rests)
                if load.at_once is not None:
                    # What is to be stored, at the beginning, has to be there when this step is through.
                    ends = [piece.span.end - rest.rows[0].start for piece in rest.tail]
                    rest.rows = self.slices.begin(load.request_id, rest.rows, max([load.at_once, *ends]))
                rests.append(rest)
            self._compute(rests)

    def fill_in_background(self, fills: Sequence[ChunkFill]) -> None:
        """Fill chunks that requests lacked. All ranks do the same."""
        for fill in fills:
            self._scratch = fill.blocks
            chunks = {
                self.cache.key_of_hash(digest, len(tokens), ANY_LENGTH): tokens for digest, tokens in fill.chunks
            }
            try:
                with self.timer.stage("fill"):
                    self.cache.fill(chunks, fill.context, ANY_LENGTH)
            except Exception:
                logger.exception("could not fill %d chunk(s) in the background", len(chunks))
            else:
                self._count("chunks_filled", "", len(chunks))
                self._count("tokens", "filled", sum(map(len, chunks.values())))

    def _assemble(self, load: ChunkLoad, before: Sequence[_Rest]) -> _Rest:
        """Put in place what the store can give; what is left to compute. ``before`` is what is left of the step's
        earlier requests."""
        # Pinned, so that no other thread puts anything in their place before the GPU was told to read them.
        with ExitStack() as pins:
            try:
                brought = self._bring(load, pins)
            except Exception:
                logger.exception("could not load the chunks of request %s; it is prefilled instead", load.request_id)
                brought = None
            if self._ranks.all_have([brought is not None])[0]:
                assert brought is not None
                return self._choose(load, brought, before)
        self._count("fallbacks", "load-error")
        # Not left to vLLM (get_block_ids_with_load_errors): 0.26's V2 runner would go on with the bad blocks.
        first, end = self._first_fresh(load, []), load.prompt.question.start
        return _Rest([Row(load.prompt.token_ids[first:end], first, load.blocks)])

    def _first_fresh(self, load: ChunkLoad, brought: Sequence[Span]) -> int:
        """Where computing may start. If vLLM's prefix cache has the first tokens of a chunk, and no entry brings the
        others, they cannot be continued with: layers with a sliding window may lack what comes before. Computed as a
        whole, the chunk comes to stand also in blocks that other requests share: exact, where it was reused."""
        for span in load.prompt.chunks:
            if span.start < load.first < span.end and span not in brought and self._tails.cuts(len(span)):
                return span.start
        return load.first

    def _bring(self, load: ChunkLoad, pins: ExitStack) -> _Brought:
        """Find or fill what the store can give and put it in place."""
        prompt = load.prompt
        context = self.cache.context_of(prompt)
        chunks = [
            _Piece(span, prompt.tokens_of(span), context, self.cache.key_of_hash(digest, len(span), ANY_LENGTH))
            for span, digest in zip(prompt.chunks, load.digests, strict=True)
            if span.end > load.first
        ]
        tail = self._system_tail(load)
        pins.enter_context(self.cache.store.pin([piece.key for piece in (*chunks, *tail)]))
        with self.timer.stage("lookup"):
            entries = self._find(chunks, tail)
        missing = {piece.key: piece for piece in chunks if piece.key not in entries}
        if missing and load.fill:
            with self.timer.stage("fill"):
                entries |= self._fill(list(missing.values()), load)
        usable = [piece for piece in (*tail, *chunks) if piece.key in entries]
        placed = [(entries[piece.key], piece.span.start) for piece in usable]
        with self.timer.stage("remap", sum(len(piece.tokens) for piece in usable)) as remap:
            remap.end = self._blocks.place(placed, load.blocks, load.first)
        moves = [(entries[piece.key], piece.span.start) for piece in chunks if piece.key in entries]
        return _Brought([piece.span for piece in usable], moves, [piece for piece in tail if piece not in usable])

    def _choose(self, load: ChunkLoad, brought: _Brought, before: Sequence[_Rest]) -> _Rest:
        """What no entry brought, and what the policy picks, to be computed in sight of everything before it."""
        prompt = load.prompt
        fresh = np.zeros(prompt.question.start, dtype=bool)
        at = self._first_fresh(load, brought.spans)
        for span in brought.spans:
            fresh[at : span.start] = True
            at = max(at, span.end)
        fresh[at:] = True
        rest = _Rest(self._rows(load, fresh), brought.new_tail)

        def compute_fresh() -> None:
            # Earlier requests', too: vLLM's prefix cache may have handed this one blocks that they are to compute.
            due = [*before, rest]
            self._compute(due)
            for each in due:
                each.rows, each.tail = [], []

        blended = np.zeros_like(fresh)
        blended[self._blender.positions(load, brought.moves, compute_fresh)] = True
        blended &= ~fresh
        recomputed = int(blended.sum())
        moved = sum(at + len(entry.tokens) - max(at, load.first) for entry, at in brought.moves)
        self._count("tokens", "fresh", int(fresh.sum()))
        self._count("tokens", "recomputed", recomputed)
        self._count("tokens", "reused", moved - recomputed)
        rest.rows = self._rows(load, blended | fresh if rest.rows else blended)
        return rest

    @staticmethod
    def _rows(load: ChunkLoad, wanted: np.ndarray) -> list[Row]:
        """Every run of ``wanted`` tokens, ``[tokens]`` bool."""
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).tolist()
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [Row(load.prompt.token_ids[start:end], start, load.blocks) for start, end in pairs]

    def _compute(self, rests: Sequence[_Rest]) -> None:
        """Run all that is left of some requests in one go."""
        rows: list[Row] = []
        parts: list[Part] = []
        for rest in rests:
            # The end of the system prompt is in the first row: nothing before it is computed.
            parts += [Part(len(rows), piece.span.start, piece.span.end) for piece in rest.tail]
            rows += rest.rows
        if not rows:
            return
        pieces = [piece for rest in rests for piece in rest.tail]
        with self.timer.stage("blend", sum(len(row.tokens) for row in rows)):
            computed = self._blocks.compute(rows, parts)
        for piece, (k, v) in zip(pieces, computed, strict=True):
            self.cache.put(piece.key, piece.tokens, piece.context, k, v)

    def _system_tail(self, load: ChunkLoad) -> list[_Piece]:
        """The system tokens behind the last full block. vLLM's prefix cache has full blocks alone; with these few in
        the store, a known system prompt needs no forward at all. They are kept where they are: exact, not moved."""
        prompt, size = load.prompt, self._forward.block_sizes[0]
        span = Span(prompt.system.end // size * size, prompt.system.end)
        if not load.shared or not span or load.first > span.start:
            return []
        tokens, context = prompt.tokens_of(span), prompt.token_ids[: span.start]
        return [_Piece(span, tokens, context, self.cache.key(tokens, context, ANY_LENGTH))]

    def _find(self, chunks: Sequence[_Piece], tail: Sequence[_Piece]) -> dict[ChunkKey, ChunkKV]:
        """The entries that every rank has."""
        entries: dict[ChunkKey, ChunkKV] = {}
        pieces = list({piece.key: piece for piece in (*chunks, *tail)}.values())
        absent = self.cache.store.absent(piece.key for piece in pieces)
        results = [self._look_up(piece, piece not in tail, absent) for piece in pieces]
        agreed = self._ranks.all_have([result.entry is not None for result in results])
        for piece, result, everywhere in zip(pieces, results, agreed, strict=True):
            if everywhere:
                assert result.entry is not None
                entries[piece.key] = result.entry
            if piece not in tail and everywhere:
                self._count("chunk_hits", str(result.tier))
            elif piece not in tail:
                self._count("chunk_misses", result.reason.value if result.reason else "other-rank")
        return entries

    def _look_up(self, piece: _Piece, counted: bool, absent: Collection[tuple[int, ChunkKey]]) -> LookupResult:
        """Whatever goes wrong is a miss: on the other ranks it may not, and all have to vote on the same things."""
        try:
            return self.cache.store.lookup(piece.key, piece.tokens, piece.context, counted, absent)
        except Exception:
            logger.exception("could not look up a chunk of %d tokens", len(piece.tokens))
            return LookupResult(None, None, MissReason.ERROR)

    def _fill(self, missing: Sequence[_Piece], load: ChunkLoad) -> dict[ChunkKey, ChunkKV]:
        """Compute and store what is missing, in the request's own blocks, which are written anew afterwards, and the
        spare ones."""
        sizes, length = self._forward.block_sizes, len(load.prompt.token_ids)
        self._scratch = [
            (*row, *load.spare)[load.own // size :] for row, size in zip(load.blocks, sizes, strict=True)
        ]
        room = min(len(row) * size for row, size in zip(self._scratch, sizes, strict=True))
        fitting = []
        for piece in missing:
            # vLLM's prefix cache may hold so much of the prompt that the rest has too few blocks.
            if len(piece.context) + len(piece.tokens) <= room and self.cache.fits(
                len(piece.tokens), piece.context, length
            ):
                fitting.append(piece)
            else:
                logger.warning(
                    "a chunk of %d tokens is computed as ordinary text: no room to fill it", len(piece.tokens)
                )
        if not fitting:
            return {}
        entries = self.cache.fill({piece.key: piece.tokens for piece in fitting}, fitting[0].context, length)
        self._count("chunks_filled", "", len(entries))
        self._count("tokens", "filled", sum(len(entry.tokens) for entry in entries))
        return {entry.key: entry for entry in entries}

    def _count(self, name: CountName, label: str, amount: int = 1) -> None:
        """All ranks do the same for a request; one of them counts."""
        if self._ranks.rank == 0:
            self.stats.count(name, label, amount)

    def fill(self, context: Sequence[int], chunks: Sequence[Sequence[int]], length: int) -> list[KV]:
        """Canonical KV of each chunk, in the blocks that are scratch space just now."""
        return self._blocks.fill(context, chunks, self._scratch)
