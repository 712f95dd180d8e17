"""Loads the stored entries of a request into its blocks."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.limits import shown_id
from kvmosaic.core.prompt import Span
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.messages import ChunkLoad
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.fetcher import ChunkFetcher
from kvmosaic.engines.vllm.worker_side.filler import ChunkFiller
from kvmosaic.engines.vllm.worker_side.images import LoadImages
from kvmosaic.store import Fetched, LookupResult, MissReason

logger = logging.getLogger(__name__)


class Segment(NamedTuple):
    """Consecutive tokens of a prompt that may be one entry in the store."""

    span: Span
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    key: ChunkKey


@dataclass(frozen=True)
class Brought:
    """Entries that were placed in a request's blocks."""

    spans: list[Span]
    """Spans of all placed entries, ascending."""
    moves: list[tuple[ChunkKV, int]]
    """Placed entries of chunks, and their positions."""
    system_remainder: Segment | None
    """The end of the system prompt, if it is still to be computed and stored."""


class Bringer:
    """Finds or fills a request's chunks, and puts them in place. All ranks do the same, or agree by vote."""

    def __init__(
        self,
        cache: ChunkCache,
        fetcher: ChunkFetcher,
        paged: RequestBlocks,
        filler: ChunkFiller,
        block_sizes: Sequence[int],
        images: LoadImages,
        *,
        ranks: Ranks,
        timer: StageTimer,
        stats: ChunkStats,
    ) -> None:
        self._cache = cache
        self._fetcher = fetcher
        self._paged = paged
        self._filler = filler
        self._block_sizes = block_sizes
        self._images = images
        self._ranks = ranks
        self._timer = timer
        self._stats = stats

    def bring(self, load: ChunkLoad, pins: ExitStack) -> Brought | None:
        """Place the entries that the store has. Returns ``None`` if that failed on some rank. While ``pins`` are
        open, no other thread overwrites the entries: the GPU may read them only later."""
        prompt = load.prompt
        context = self._cache.context_of(prompt)
        lags = {span: self._images.lag(load, span) for span in prompt.chunks if span.end > load.start}
        chunks = [
            Segment(span, prompt.tokens_of(span), context, self._cache.key_of_hash(digest, len(span)))
            for span, digest in zip(prompt.chunks, load.digests, strict=True)
            if lags.get(span) is not None
        ]
        remainder = self._system_remainder(load)
        chunks = _of_one_content(chunks, remainder)
        with self._timer.stage("lookup"):
            entries = self._find(chunks, remainder, load, pins)
        missing = [segment for segment in chunks if segment.key not in entries]
        if missing and load.fill:
            filled = self._ranks.together(lambda: self._fill(missing, load), "filling chunks")
            if filled is None:
                self._stats.failed("fill")
            entries |= filled or {}
        usable = [segment for segment in (*remainder, *chunks) if segment.key in entries]
        moves = [
            (_with_lag(entries[segment.key], lags[segment.span]), segment.span.start)
            for segment in chunks
            if segment.key in entries
        ]
        # The end of a system prompt stays where it was computed.
        placed = [(entries[segment.key], segment.span.start) for segment in remainder if segment.key in entries]
        is_placed = False
        try:
            with self._timer.stage("remap", sum(len(segment.tokens) for segment in usable)) as remap:
                remap.end = self._paged.place([*placed, *moves], load.blocks, load.start)
            is_placed = True
        except Exception:
            logger.exception(
                "could not load the chunks of request %s; it is prefilled instead", shown_id(load.request_id)
            )
            self._stats.failed("place")
        if not self._ranks.all_have([is_placed])[0]:
            return None
        return Brought(
            [segment.span for segment in usable],
            moves,
            next((segment for segment in remainder if segment not in usable), None),
        )

    def _system_remainder(self, load: ChunkLoad) -> list[Segment]:
        """The system tokens behind the last full block, if any. vLLM's prefix cache has only full blocks; with these
        few tokens in the store, a known system prompt needs no forward at all. They are not moved, so they are
        exact."""
        prompt, size = load.prompt, self._block_sizes[0]
        span = Span(prompt.system.end // size * size, prompt.system.end)
        if not load.is_findable or not span or load.start > span.start:
            return []
        tokens, context = prompt.tokens_of(span), prompt.token_ids[: span.start]
        return [Segment(span, tokens, context, self._cache.exact_key(tokens, context))]

    def _find(
        self, chunks: Sequence[Segment], remainder: Sequence[Segment], load: ChunkLoad, pins: ExitStack
    ) -> dict[ChunkKey, ChunkKV]:
        """The entries that every rank has, in memory or fetched for the request. No slower tier is asked, because
        other requests wait for this step."""
        entries: dict[ChunkKey, ChunkKV] = {}
        segments = list({segment.key: segment for segment in (*chunks, *remainder)}.values())
        results = [LookupResult(None, None, MissReason.ERROR)] * len(segments)
        try:
            pins.enter_context(self._cache.store.pin([segment.key for segment in segments]))
            held = self._fetcher.kept_for(load.request_id)
            results = [self._look_up(segment, segment not in remainder, held) for segment in segments]
            slow = zip(segments, results, strict=True)
            self._fetcher.bring_up([segment.key for segment, found in slow if found.reason == MissReason.SLOW])
        except Exception:
            logger.exception("could not look up the chunks of request %s", shown_id(load.request_id))
            self._stats.failed("lookup")
        agreed = self._ranks.all_have([result.entry is not None for result in results])
        for segment, result, is_everywhere in zip(segments, results, agreed, strict=True):
            if is_everywhere:
                assert result.entry is not None
                entries[segment.key] = result.entry
            if segment not in remainder and is_everywhere:
                self._stats.count_alike("chunk_hits", str(result.tier))
            elif segment not in remainder:
                self._stats.count_alike("chunk_misses", result.reason.value if result.reason else "other-rank")
        return entries

    def _look_up(self, segment: Segment, counted: bool, held: Mapping[ChunkKey, Fetched]) -> LookupResult:
        """Look up a segment. An error counts as a miss: other ranks may have no error, and all ranks have to vote on
        the same segments."""
        try:
            return self._cache.store.lookup(segment.key, segment.tokens, segment.context, counted, held=held)
        except Exception:
            logger.exception("could not look up a chunk of %d tokens", len(segment.tokens))
            self._stats.failed("lookup")
            return LookupResult(None, None, MissReason.ERROR)

    def _fill(self, missing: Sequence[Segment], load: ChunkLoad) -> dict[ChunkKey, ChunkKV]:
        """Compute and store missing chunks, in the request's own blocks, which are overwritten afterwards, and in the
        spare ones."""
        sizes = self._block_sizes
        blocks = [
            (*row, *load.spare)[load.shared_until // size :] for row, size in zip(load.blocks, sizes, strict=True)
        ]
        room = min(len(row) * size for row, size in zip(blocks, sizes, strict=True))
        fitting: dict[ChunkKey, tuple[int, ...]] = {}
        longest = self._cache.max_stored_tokens
        for segment in missing:
            tokens, context = segment.tokens, segment.context
            if longest is not None and len(tokens) > longest:
                continue  # as ordinary text, it is computed once and exactly
            # vLLM's prefix cache may hold so much of the prompt that the rest has too few blocks.
            if len(context) + len(tokens) <= room and self._cache.fits(len(tokens), context):
                fitting[segment.key] = tokens
            else:
                logger.warning("a chunk of %d tokens is computed as ordinary text: no room to fill it", len(tokens))
        if not fitting:
            return {}
        images = {}
        for segment in missing:
            inside = None if load.images is None else load.images.inside(segment.span)
            if inside is not None:
                images[segment.key] = inside
        return self._filler.fill(fitting, missing[0].context, blocks, load.adapter, images)


def _of_one_content(chunks: Sequence[Segment], others: Sequence[Segment]) -> list[Segment]:
    """The chunks, without those whose tokens differ from those of an earlier segment with the same key. The usual
    hash is not cryptographic: somebody may write two documents with one hash, and a prompt with both must not get
    the KV of one twice."""
    known = {segment.key: (segment.tokens, segment.context) for segment in others}
    return [
        segment
        for segment in chunks
        if known.setdefault(segment.key, (segment.tokens, segment.context)) == (segment.tokens, segment.context)
    ]


def _with_lag(entry: ChunkKV, lag: int | None) -> ChunkKV:
    return replace(entry, lag=lag) if lag else entry
