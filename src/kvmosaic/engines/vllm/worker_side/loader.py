"""Loads requests: brings what the store has, chooses what is recomputed, computes that and all the rest."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from kvmosaic.core.prompt import Span
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run, runs_of
from kvmosaic.engines.vllm.messages import ChunkLoad
from kvmosaic.engines.vllm.paged.base import RequestBlocks, RunRange
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.blender import Blender
from kvmosaic.engines.vllm.worker_side.bringer import Bringer, Brought, Segment
from kvmosaic.engines.vllm.worker_side.slices import Slices

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Due:
    """What is left to compute of a request before its question."""

    runs: list[Run]
    system_remainder: Segment | None = None
    """The end of the system prompt, to be stored once it is computed; in the first run."""


class ChunkLoader:
    """Brings the KV of requests up to their questions into their blocks."""

    def __init__(
        self,
        cache: ChunkCache,
        paged: RequestBlocks,
        ranks: Ranks,
        bringer: Bringer,
        blender: Blender,
        *,
        timer: StageTimer,
        stats: ChunkStats,
    ) -> None:
        self._cache = cache
        self._paged = paged
        self._ranks = ranks
        self._bringer = bringer
        self._blender = blender
        self._timer = timer
        self._stats = stats
        self.slices = Slices()
        """What later steps are to compute."""

    def load(self, loads: Sequence[ChunkLoad], slice_tokens: int) -> None:
        """Bring positions ``load.start`` up to the question of each request into its blocks, after the next
        ``slice_tokens`` of what earlier steps left. If that fails for a request, on any rank, it is prefilled as
        plain vLLM would."""
        if not loads and not self.slices:
            return
        with self._timer.stage("load"):
            due = [_Due(runs) for runs in self.slices.go_on(slice_tokens)]
            for load in loads:
                due = self._assemble(load, due, slice_tokens)
            self._compute(due)

    def _assemble(self, load: ChunkLoad, before: list[_Due], slice_tokens: int) -> list[_Due]:
        """Put in place what the store can give of a request. Returns what is left to compute of this one and of those
        ``before`` it in the step."""
        with ExitStack() as pins:
            brought = self._bringer.bring(load, pins)
            if brought is None:
                return [*before, self._whole(load, Fallback.LOAD_ERROR, slice_tokens)]
            fresh = self._fresh(load, brought.spans)
            mine = _Due(_runs(load, fresh), brought.system_remainder)
            blend = self._blender.prepare(load, brought.moves)
            if blend is not None and blend.needs_context:
                # Earlier requests', too: vLLM's prefix cache may have handed this one blocks that they are to
                # compute.
                self._compute([*before, mine])
                before, mine = [], _Due([])
            blended = None if blend is None else self._blender.choose(blend)
            if blend is None or blended is None:
                self._stats.failed("choose")
                return [*before, self._whole(load, Fallback.ERROR, slice_tokens)]
            wanted = np.zeros_like(fresh)
            wanted[blended] = True
            wanted &= ~fresh
            self._count(load, brought, fresh, int(wanted.sum()))
        if mine.runs:
            wanted |= fresh
        else:
            # Text behind a changed token was computed before it, to choose; it has to see what that became.
            changed = blend.probe.first_changed(blended)
            wanted[changed:] |= fresh[changed:]
        return [*before, self._first_slice(load, _Due(_runs(load, wanted), mine.system_remainder), slice_tokens)]

    def _whole(self, load: ChunkLoad, reason: Fallback, slice_tokens: int) -> _Due:
        """All of a request, as plain vLLM would compute it: whatever stands in its blocks is written again. That is
        not left to vLLM (``get_block_ids_with_load_errors``): 0.26's V2 runner would go on with the bad blocks."""
        self._stats.count_alike("fallbacks", reason)
        return self._first_slice(load, _Due(_runs(load, self._fresh(load, []))), slice_tokens)

    def _count(self, load: ChunkLoad, brought: Brought, fresh: np.ndarray, recomputed: int) -> None:
        moved = sum(at + len(entry.tokens) - max(at, load.start) for entry, at in brought.moves)
        self._stats.count_alike("tokens", "fresh", int(fresh.sum()))
        self._stats.count_alike("tokens", "recomputed", recomputed)
        self._stats.count_alike("tokens", "reused", moved - recomputed)

    def _first_slice(self, load: ChunkLoad, mine: _Due, slice_tokens: int) -> _Due:
        """What of a request this step computes; later ones compute the rest."""
        if not load.is_sliced:
            return mine
        now = self.slices.begin(load.request_id, mine.runs, None if load.writes_shared else slice_tokens)
        remainder = mine.system_remainder
        if remainder is not None and remainder.span.end > now[0].end:
            remainder = None  # only what one step computes can be stored; another request will
        return _Due(now, remainder)

    def _fresh(self, load: ChunkLoad, brought: Sequence[Span]) -> np.ndarray:
        """The tokens before the question that no entry brought, ``[tokens]`` bool."""
        fresh = np.zeros(load.prompt.question.start, dtype=bool)
        at = self._first_fresh(load, brought)
        for span in brought:
            fresh[at : span.start] = True
            at = max(at, span.end)
        fresh[at:] = True
        return fresh

    def _first_fresh(self, load: ChunkLoad, brought: Sequence[Span]) -> int:
        """Where computing may start. If vLLM's prefix cache has the first tokens of a chunk, and no entry brings the
        others, computing cannot start between them: layers with a sliding window may lack what comes before. The
        chunk is then computed as a whole, also in blocks that other requests share: they become exact where they were
        reused."""
        for span in load.prompt.chunks:
            if span.start < load.start < span.end and span not in brought and self._paged.tails.cuts(len(span)):
                return span.start
        return load.start

    def _compute(self, due: Sequence[_Due]) -> None:
        """Compute all that is left of some requests in one go."""
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
        with self._timer.stage("blend", sum(len(run.tokens) for run in runs)):
            computed = self._ranks.together(lambda: self._paged.compute(runs, ranges), "computing requests")
        if computed is None:
            self._compute_again(due)
            return
        for segment, (k, v) in zip(segments, computed, strict=True):
            self._store(segment, k, v)

    def _store(self, segment: Segment, k: torch.Tensor, v: torch.Tensor) -> None:
        try:
            self._cache.put(segment.key, segment.tokens, segment.context, k, v, "system-tail")
        except Exception:
            logger.exception("could not store the end of a system prompt, of %d tokens", len(segment.tokens))
            self._stats.failed("store")

    def _compute_again(self, due: Sequence[_Due]) -> None:
        """Compute what failed once more, one request after the other, which takes less memory. Runs are written as a
        whole, so nothing is left of the first time. What fails twice fails as vLLM's own forward would."""
        self._stats.failed("compute")
        torch.cuda.empty_cache()

        def compute() -> bool:
            for each in due:
                self._paged.compute(each.runs, [])
            return True

        if self._ranks.together(compute, "computing requests again") is None:
            raise RuntimeError("requests could not be computed, twice in a row; the log has the reasons")


def _runs(load: ChunkLoad, wanted: np.ndarray) -> list[Run]:
    return runs_of(wanted, load.prompt.token_ids, load.blocks)
