"""Finds text that recurs after different beginnings, in prompts whose documents are not named."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from kvmosaic.core.discovery.choice import Discovered, IsStored, choose
from kvmosaic.core.discovery.cuts import MAX_SEGMENT, Cutter
from kvmosaic.core.discovery.history import History
from kvmosaic.core.discovery.plans import Plans
from kvmosaic.core.discovery.runs import Place, Runs
from kvmosaic.core.discovery.segments import SegmentHasher, Segments
from kvmosaic.core.prompt import Span

MIN_RUN = 64
"""Minimum length of a run that is worth an entry, in tokens. A passage of a hundred words has about twice as many."""


class Discovery:
    """Looks at prompts one after the other and finds the *runs* of each: texts that an earlier prompt had after a
    different beginning.

    The first prompt with a document introduces it. The second makes it a run, to be stored. The third finds it in the
    store. A beginning that a prompt shares with an earlier one is left to the engine's own prefix cache, and keeps
    the chunks that it had in the earlier prompt.

    Texts are compared by their hashes. After a hash collision a span counts as a run but is not found in the store,
    because the store compares tokens. Takes linear time for any prompt. Memory: at most 32 MiB, and 32 bytes per
    token of the longest prompt."""

    def __init__(self, markers: Iterable[int], prefix_tokens: int, shortest: int = MIN_RUN) -> None:
        """``markers``: ids of tokens between the turns of a conversation, which no run contains. ``prefix_tokens``:
        capacity of the engine's own prefix cache, in tokens. ``shortest``: minimum tokens of a run."""
        self._shortest = shortest
        self._cutter = Cutter(markers, shortest)
        self._hasher = SegmentHasher()
        self._history = History(prefix_tokens)
        self._plans = Plans()
        self._runs = Runs()

    def find(
        self,
        tokens: Sequence[int],
        covered: Sequence[Span] = (),
        salt: str | None = None,
        is_stored: IsStored = lambda span, first: False,
    ) -> Discovered:
        """The runs of the next prompt. None overlaps a span of ``covered``, and none includes the last token. Prompts
        with different salts never share runs.

        ``is_stored`` is only called for runs that are made of other runs, and for these pieces."""
        if len(tokens) <= self._shortest:
            return Discovered()
        numbers = np.asarray(tokens, np.int64)
        segments = self._hasher.hash(numbers, self._cutter.cut(numbers, covered), salt)
        shared = self._history.shared(segments)
        chunks = self._plans.known(segments, shared)
        new = choose(segments, shared, self._new(segments, shared), [*covered, *chunks], is_stored)
        self._plans.add(segments, shared, new.chunks)
        self._history.add(segments, shared)
        return Discovered((*chunks, *new.chunks), new.to_fill)

    def _new(self, segments: Segments, shared: int) -> list[Place]:
        """The runs after the first ``shared`` segments: known ones, and new ones, which are known from now on."""
        known = self._runs.find(segments, shared)
        chunks: list[Place] = []
        at = reached = 0
        for begin, end in self._history.stretches(segments, shared, self._shortest):
            start, stop = segments.edges[begin], segments.edges[end]
            while at < len(known) and known[at].end <= start:
                chunks.append(_alone(known[at]))
                at += 1
            inside = []
            while at < len(known) and known[at].start < stop:
                inside.append(known[at])
                at += 1
            if reached > start:  # by a run of the previous stretch
                begin = bisect_left(segments.edges, reached)
            limit = max([segments.limits[end - 1], *(place.end for place in inside[-1:])])
            end = min(end, bisect_right(segments.edges, limit) - 1)
            settled = self._settle(segments, begin, end, inside)
            chunks += settled
            reached = max(reached, *(place.end for place in (*settled, *inside)), 0)
        chunks += [_alone(place) for place in known[at:]]
        return chunks

    def _settle(self, segments: Segments, begin: int, end: int, known: list[Place]) -> list[Place]:
        """Runs of a stretch of segments that an earlier prompt also had. ``known``: the known runs in it.

        Known runs may be stored, so they are used, and the text between them becomes new runs. But if the same pieces
        recur twice as the same longer text, and not otherwise, that text becomes the run. It is one entry instead of
        several that were computed without each other. The pieces are used until that entry is stored."""
        if begin >= end:
            return [_alone(place) for place in known]
        start, stop = segments.edges[begin], segments.edges[end]
        if len(known) == 1 and stop - start < known[0].run.tokens + self._shortest:
            return [_alone(known[0])]
        pieces = sorted([*known, *self._gaps(segments, begin, end, known)], key=lambda piece: piece.start)
        if len(pieces) == 1 and not known:
            return pieces
        # A known run may begin or end at a position where this prompt has no cut.
        if pieces and (pieces[0].start < start - MAX_SEGMENT or pieces[-1].end > stop + MAX_SEGMENT):
            return [_alone(piece) for piece in pieces]
        whole = hash(tuple(piece.run.digest for piece in pieces))
        if pieces and all(piece.run.within == whole for piece in pieces):
            longer = self._runs.add(segments, begin, end)
            longer.remember(pieces)
            return [longer]
        for piece in pieces:
            piece.run.within = whole
        return pieces

    def _gaps(self, segments: Segments, begin: int, end: int, known: list[Place]) -> list[Place]:
        """New runs: the text between the ``known`` runs of a stretch, where it is long enough."""
        edges = segments.edges
        firsts = [begin, *(bisect_left(edges, place.end) for place in known)]
        lasts = [*(bisect_right(edges, place.start) - 1 for place in known), end]
        return [
            self._runs.add(segments, first, last)
            for first, last in zip(firsts, lasts, strict=True)
            if first < last and edges[last] - edges[first] >= self._shortest
        ]


def _alone(place: Place) -> Place:
    """The place, with its run marked as not part of a longer text."""
    place.run.within = 0
    return place
