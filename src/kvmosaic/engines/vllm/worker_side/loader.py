"""Loads requests: places stored entries, chooses the tokens to recompute, computes those and all remaining tokens."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kvmosaic.core.accelerator import free_unused_memory
from kvmosaic.core.entry import ChunkKV, PackedKV
from kvmosaic.core.prompt import Span
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.results import Fallback, joined
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run, runs_of
from kvmosaic.engines.vllm.messages import ChunkLoad, Recomputed, adapter_id
from kvmosaic.engines.vllm.paged.base import RequestBlocks, RunRange
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.adapters import LoadedAdapters
from kvmosaic.engines.vllm.worker_side.blender import Blend, Blender, Choice
from kvmosaic.engines.vllm.worker_side.bringer import Bringer, Brought, Segment
from kvmosaic.engines.vllm.worker_side.images import LoadImages
from kvmosaic.engines.vllm.worker_side.narrower import Narrower
from kvmosaic.engines.vllm.worker_side.slices import Slices

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Due:
    """Tokens of a request that its load still has to compute."""

    runs: list[Run]
    load: ChunkLoad
    """The task that they are part of."""
    system_remainder: Segment | None = None
    """The end of the system prompt, to be stored once it is computed. It is in the first run."""


@dataclass(frozen=True)
class _Placed:
    """A request whose stored entries are in its blocks."""

    brought: Brought
    fresh: np.ndarray
    """The tokens before the question that no entry provides, ``[tokens]`` bool."""
    blend: Blend
    context: _Due
    """These tokens, as runs."""


class ChunkLoader:
    """Loads the KV of requests into their blocks, up to their questions or their last tokens."""

    def __init__(
        self,
        cache: ChunkCache,
        paged: RequestBlocks,
        ranks: Ranks,
        bringer: Bringer,
        blender: Blender,
        narrower: Narrower,
        adapters: LoadedAdapters,
        images: LoadImages,
        *,
        timer: StageTimer,
        stats: ChunkStats,
    ) -> None:
        self._cache = cache
        self._paged = paged
        self._ranks = ranks
        self._bringer = bringer
        self._blender = blender
        self._narrower = narrower
        self._adapters = adapters
        self._images = images
        self._timer = timer
        self._stats = stats
        self.slices = Slices()
        """Runs that later steps have to compute."""
        self.recomputed: dict[str, Recomputed] = {}
        """The tokens that were recomputed since the last report, by request that is reported."""

    def load(self, loads: Sequence[ChunkLoad], slice_tokens: int) -> None:
        """Load the positions ``load.start .. load.end-1`` of each request into its blocks. Also compute the
        next ``slice_tokens`` of each request that earlier steps left unfinished, before these. If loading a request
        fails on any rank, it is prefilled as plain vLLM would."""
        if not loads and not self.slices:
            return
        with self._timer.stage("load"):
            sliced = self.slices.loads
            due = [_Due(runs, load) for runs, load in zip(self.slices.go_on(slice_tokens), sliced, strict=True)]
            group: list[ChunkLoad] = []
            written = {block for load in sliced for block in self._blocks_of(load)[1]}
            for load in loads:
                read, mine = self._blocks_of(load)
                # vLLM's prefix cache may give a request blocks that an earlier one of the step is to compute.
                if not written.isdisjoint(read):
                    self._compute([*due, *self._assemble(group, slice_tokens)])
                    due, group, written = [], [], set()
                group.append(load)
                written.update(mine)
            due += self._assemble(group, slice_tokens)
            self._images.forget()
            self._compute(due)

    def _blocks_of(self, load: ChunkLoad) -> tuple[Sequence[int], Sequence[int]]:
        """The blocks that a load only reads, and those that it writes."""
        blocks, first = load.blocks[0], load.start // self._paged.block_size
        return blocks[:first], blocks[first:]

    def _assemble(self, loads: Sequence[ChunkLoad], slice_tokens: int) -> list[_Due]:
        """Place the stored entries of requests, of which none reads blocks that another one writes, and choose
        tokens. Returns those that this step is to compute."""
        with ExitStack() as pins:
            placed = [self._place(load, pins) for load in loads]
            ready = [each for each in placed if isinstance(each, _Placed)]
            self._compute([each.context for each in ready if each.blend.needs_context])
            choices = iter(self._blender.choose([each.blend for each in ready]))
            due = [
                self._rest(each, next(choices)) if isinstance(each, _Placed) else self._whole(load, each)
                for load, each in zip(loads, placed, strict=True)
            ]
        return [self._first_slice(each, slice_tokens) for each in due]

    def _place(self, load: ChunkLoad, pins: ExitStack) -> _Placed | Fallback:
        """Place the stored entries of a request, or say why it is prefilled."""
        if not self._adapters.can_use(load.adapter):
            # Other weights were loaded since the request was planned. Its chunks are those of the old ones.
            return Fallback.LORA
        if not self._narrower.can_serve(load):
            return Fallback.SHRINKING_SET
        brought = self._bringer.bring(load, pins)
        if brought is None:
            return Fallback.LOAD_ERROR
        fresh = self._fresh(load, brought.spans)
        blend = self._blender.prepare(load, brought.moves)
        if blend is None:
            self._stats.failed("choose")
            return Fallback.ERROR
        return _Placed(brought, fresh, blend, _Due(self._runs(load, fresh), load, brought.system_remainder))

    def _rest(self, placed: _Placed, chosen: Choice | None) -> _Due:
        """The tokens of a request that are still to be computed. ``chosen`` is ``None`` if choosing failed."""
        load, fresh, blend = placed.blend.load, placed.fresh, placed.blend
        if chosen is None:
            self._stats.failed("choose")
            return self._whole(load, Fallback.ERROR)
        wanted = np.zeros_like(fresh)
        wanted[chosen.positions] = True
        wanted &= ~fresh
        if chosen.checks:
            reason = self._narrow(load, blend, chosen, wanted, fresh)
            if reason is not None:
                return self._whole(load, reason)
        self._count(load, placed.brought, fresh, int(wanted.sum()))
        if load.is_reported and load.ratio:
            self.recomputed[load.request_id] = Recomputed(joined(np.flatnonzero(wanted)), chosen.probed)
        remainder = None
        if chosen.checks:
            wanted[:] = False  # everything before the question is computed
        elif not blend.needs_context:
            wanted |= fresh
            remainder = placed.context.system_remainder
        else:
            # Text behind a changed token was computed before the choice. It is computed again, to see the changed
            # token. Missing chunks are not: they have seen all that is before them, and are long.
            changed = blend.probe.first_changed(chosen.positions)
            again = fresh & ~_in_chunks(load) if blend.probe.keeps_fresh else fresh
            wanted[changed:] |= again[changed:]
        return _Due(self._runs(load, _with_question(load, wanted)), load, remainder)

    def _narrow(
        self, load: ChunkLoad, blend: Blend, chosen: Choice, wanted: np.ndarray, fresh: np.ndarray
    ) -> Fallback | None:
        """Compute the ``wanted`` tokens of a choice whose set shrinks, ``[tokens]`` bool, and the text behind the
        first of them, in a pass of their own. Returns why that was not possible, if so."""
        changed = blend.probe.first_changed(chosen.positions)
        due = wanted.copy()
        due[changed:] |= fresh[changed:]
        if not self._narrower.fits(int(due.sum())):
            return Fallback.SHRINKING_SET
        kept = self._narrower.compute(self._runs(load, due), fresh[due], blend.probe, chosen)
        if kept is None:
            self._stats.failed("compute")
            return Fallback.ERROR
        self._blender.note_kept(load, chosen, kept)
        return None

    def _whole(self, load: ChunkLoad, reason: Fallback) -> _Due:
        """All tokens of a request, to be computed as plain vLLM would; its blocks are overwritten. This is not left
        to vLLM (``get_block_ids_with_load_errors``), because the V2 runner of 0.26 would continue with the bad
        blocks."""
        self._stats.count_alike("fallbacks", reason)
        return self._all_of(load)

    def _all_of(self, load: ChunkLoad) -> _Due:
        return _Due(self._runs(load, _with_question(load, self._fresh(load, []))), load)

    def _count(self, load: ChunkLoad, brought: Brought, fresh: np.ndarray, recomputed: int) -> None:
        moved = sum(at + len(entry.tokens) - max(at, load.start) for entry, at in brought.moves)
        self._stats.count_alike("tokens", "fresh", int(fresh.sum()))
        self._stats.count_alike("tokens", "recomputed", recomputed)
        self._stats.count_alike("tokens", "reused", moved - recomputed)

    def _first_slice(self, mine: _Due, slice_tokens: int) -> _Due:
        """The tokens of a request that this step computes; later steps compute the rest."""
        load = mine.load
        if not load.is_sliced:
            return mine
        now = self.slices.begin(load.request_id, mine.runs, None if load.writes_shared else slice_tokens, load)
        remainder = mine.system_remainder
        if remainder is not None and remainder.span.end > now[0].end:
            remainder = None  # only what one step computes can be stored; another request will store it
        return _Due(now, load, remainder)

    def _fresh(self, load: ChunkLoad, brought: Sequence[Span]) -> np.ndarray:
        """The tokens before the question that no entry provides, ``[tokens]`` bool."""
        fresh = np.zeros(load.prompt.question.start, dtype=bool)
        at = self._first_fresh(load, brought)
        for span in brought:
            fresh[at : span.start] = True
            at = max(at, span.end)
        fresh[at:] = True
        return fresh

    def _first_fresh(self, load: ChunkLoad, brought: Sequence[Span]) -> int:
        """Position where computing may start. If vLLM's prefix cache has the first tokens of a chunk, and no entry
        provides the others, computing cannot start inside the chunk: layers with a sliding window may lack KV of
        earlier tokens. The whole chunk is then computed, including blocks that other requests share; these become
        exact instead of reused."""
        for span in load.prompt.chunks:
            if span.start < load.start < span.end and span not in brought and self._paged.tails.cuts(len(span)):
                return span.start
        return load.start

    def _compute(self, due: Sequence[_Due]) -> None:
        """Compute all tokens that are due in one go. Requests with different adapters never share blocks, so they may
        be computed in any order; requests with the same adapter share passes."""
        due = sorted(due, key=lambda each: each.runs[0].adapter_id if each.runs else 0)
        runs: list[Run] = []
        ranges: list[RunRange] = []
        segments: list[Segment] = []
        for each in due:
            if each.system_remainder is not None:
                # It is in the first run: nothing before it is computed.
                span = each.system_remainder.span
                ranges.append(RunRange(len(runs), span.start, span.end))
                segments.append(each.system_remainder)
            runs += each.runs
        if not runs:
            return
        with self._timer.stage("blend", sum(len(run.tokens) for run in runs)) as blend:
            computed = self._ranks.together(lambda: self._paged.compute(runs, ranges), "computing requests")
            blend.has_failed = computed is None
        if computed is None:
            self._compute_again(due)
            return
        for segment, packed in zip(segments, computed, strict=True):
            self._store(segment, packed)

    def _store(self, segment: Segment, packed: PackedKV) -> None:
        try:
            self._cache.put(ChunkKV.from_packed(segment.key, segment.tokens, segment.context, packed, "system-tail"))
        except Exception:
            logger.exception("could not store the end of a system prompt, of %d tokens", len(segment.tokens))
            self._stats.failed("store")

    def _compute_again(self, due: Sequence[_Due]) -> None:
        """Retry a failed computation, one request after the other, which takes less memory. Runs are written as a
        whole, so nothing is left of the first attempt. A request that fails alone is computed as plain vLLM would, in
        one run of tokens."""
        self._stats.failed("compute")
        free_unused_memory()
        for each in due:
            if not self._computes_alone(each):
                self._stats.failed("compute")
                self._compute_plainly(each.load)

    def _computes_alone(self, due: _Due) -> bool:
        """Compute the runs of a single request. Returns whether that worked on all ranks."""
        computed = self._ranks.together(lambda: self._paged.compute(due.runs, []), "computing a request again")
        return computed is not None

    def _compute_plainly(self, load: ChunkLoad) -> None:
        """Compute all tokens of a request before its question, also those that were left to later steps. A failure is
        raised, like a failure of vLLM's own forward: vLLM would go on with KV that is missing
        (``get_block_ids_with_load_errors`` works for one group of caches only, and a step that it has planned already
        may have used the KV)."""
        self._stats.count_alike("fallbacks", Fallback.ERROR)
        computed = self._ranks.together(lambda: self._paged.compute(self._all_of(load).runs), "prefilling a request")
        self._images.forget()
        if computed is None:
            raise RuntimeError("a request could not be computed, not even as plain text; the log has the reasons")
        if load.request_id in self.slices:
            self.slices.begin(load.request_id, [], None)

    def _runs(self, load: ChunkLoad, wanted: np.ndarray) -> list[Run]:
        images = self._images.of(load)
        return runs_of(wanted, load.prompt.token_ids, load.blocks, adapter_id(load.adapter), images)


def _with_question(load: ChunkLoad, wanted: np.ndarray) -> np.ndarray:
    """The ``wanted`` tokens before the question, and the part of the question that is loaded, ``[load.end]`` bool."""
    return np.concatenate([wanted, np.ones(load.end - len(wanted), dtype=bool)])


def _in_chunks(load: ChunkLoad) -> np.ndarray:
    """The tokens before the question that are in chunks, ``[tokens]`` bool."""
    inside = np.zeros(load.prompt.question.start, dtype=bool)
    for span in load.prompt.chunks:
        inside[span.start : span.end] = True
    return inside
