"""Finds text that comes back behind other beginnings, in prompts in which nothing is named."""

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
"""Tokens of the shortest run that is worth an entry. Passages of a hundred words have twice as many."""


class Discovery:
    """Is shown prompts one after the other, and says which spans of each are *runs*: texts that an earlier prompt had
    behind another beginning.

    The first prompt with a document shows it. The second makes it a run, to be stored; the third finds it. What a
    prompt begins with like an earlier one is left to the engine's own prefix cache, and has the chunks it had there.

    Hashes say what is equal. Were two of them equal by chance, a span would count as a run that nobody has stored:
    the store compares tokens. Takes linear time for any prompt, and at most 32 MiB of memory besides 32 bytes for
    each token of the longest prompt."""

    def __init__(self, markers: Iterable[int], prefix_tokens: int, shortest: int = MIN_RUN) -> None:
        """``markers``: token ids between the turns of a conversation, which no run holds. ``prefix_tokens``: tokens
        that the engine's own prefix cache holds. ``shortest``: tokens of a run."""
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
        """The runs of the next prompt: none overlaps one of ``covered``, none ends with the prompt. Prompts of
        different salts never learn from each other.

        ``is_stored`` is only asked about runs that are made of others, and about those."""
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
        """The runs behind the first ``shared`` segments: those that were known, and those that are from now on."""
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
            if reached > start:  # by a run of the stretch before
                begin = bisect_left(segments.edges, reached)
            settled = self._settle(segments, begin, end, inside)
            chunks += settled
            reached = max(reached, *(place.end for place in (*settled, *inside)), 0)
        chunks += [_alone(place) for place in known[at:]]
        return chunks

    def _settle(self, segments: Segments, begin: int, end: int, known: list[Place]) -> list[Place]:
        """Runs of a stretch of segments that an earlier prompt had, too, in which there are ``known`` ones.

        Known runs are what is stored, so they are used, and the text between them becomes runs of its own. But where
        the same pieces come back twice as the same longer text and as nothing else, that text is the run: one entry
        in place of several, each of which knows nothing of the others. They are used until that entry is stored."""
        if begin >= end:
            return [_alone(place) for place in known]
        start, stop = segments.edges[begin], segments.edges[end]
        if len(known) == 1 and stop - start < known[0].run.tokens + self._shortest:
            return [_alone(known[0])]
        pieces = sorted([*known, *self._gaps(segments, begin, end, known)], key=lambda piece: piece.start)
        if len(pieces) == 1 and not known:
            return pieces
        # A known run may begin or end where this prompt has no cut.
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
        """What is between ``known`` runs of a stretch and long enough, as new runs."""
        edges = segments.edges
        firsts = [begin, *(bisect_left(edges, place.end) for place in known)]
        lasts = [*(bisect_right(edges, place.start) - 1 for place in known), end]
        return [
            self._runs.add(segments, first, last)
            for first, last in zip(firsts, lasts, strict=True)
            if first < last and edges[last] - edges[first] >= self._shortest
        ]


def _alone(place: Place) -> Place:
    """A run that is no part of a longer text."""
    place.run.within = 0
    return place
