"""Runs: texts that were seen after different beginnings."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress, islice
from typing import NamedTuple

from kvmosaic.core.discovery.cuts import MAX_SEGMENT
from kvmosaic.core.discovery.segments import Segments
from kvmosaic.core.prompt import Span

MAX_RUNS = 2**14
"""Maximum number of known runs. The least recently used one is evicted."""
MAX_ALIKE = 8
"""Maximum number of runs with the same second segment, so that finding the longest is fast."""
MAX_PIECES = 16
"""Maximum number of pieces that a run remembers: the longest ones."""


@dataclass(eq=False, slots=True)
class Run:
    """A text that was seen after different beginnings."""

    anchor: int
    """Hash of the second segment. The start of the first segment may depend on the text before the run."""
    lead: int
    """Number of tokens before the second segment."""
    tokens: int
    digest: int
    used: int = 0
    """Use counter of :class:`Runs` at the last use."""
    within: int = 0
    """Hash of all pieces of the longer text that the run was part of when last seen; 0 if it was part of none."""
    pieces: "array[int] | None" = None
    """Starts and ends of the runs that this one was made of, relative to its own start. A piece may begin before this
    run or end after it, and may contain smaller pieces."""

    def pieces_at(self, start: int) -> list[Span]:
        """Spans of the runs that this one was made of, if it begins at ``start``: by start, longest first."""
        offsets = self.pieces or ()
        return [Span(start + begin, start + end) for begin, end in zip(offsets[::2], offsets[1::2], strict=True)]


class Place(NamedTuple):
    """A run at tokens ``start .. end-1`` of a prompt."""

    start: int
    end: int
    run: Run

    @property
    def span(self) -> Span:
        """The same tokens."""
        return Span(self.start, self.end)

    def remember(self, pieces: Iterable["Place"]) -> None:
        """Record that this run is made of ``pieces``, and of the pieces of these."""
        spans = [span for piece in pieces for span in (piece.span, *piece.run.pieces_at(piece.start))]
        spans = sorted(sorted(spans, key=len)[-MAX_PIECES:], key=lambda span: (span.start, -span.end))
        self.run.pieces = array("i", [edge - self.start for span in spans for edge in (span.start, span.end)])


class Runs:
    """The known runs. Memory: 640 bytes per run, 10 MiB in all."""

    def __init__(self) -> None:
        self._runs: OrderedDict[int, Run] = OrderedDict()
        """By digest, the least recently used first."""
        self._anchored: dict[int, list[Run]] = {}
        """By anchor, the longest first."""
        self._uses = 0

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, segments: Segments, first: int) -> list[Place]:
        """The known runs in a prompt from segment ``first`` on, not overlapping, the longest at each position."""
        hashes, anchored = segments.hash_list, self._anchored
        is_known = map(anchored.__contains__, islice(hashes, first, None))
        anchors = list(compress(range(first, len(hashes)), is_known)) if anchored else []
        found: list[Place] = []
        at = segments.edges[first]
        best: Place | None = None
        # Without this limit, a client could build prompts in which all runs are tried everywhere.
        failures = MAX_ALIKE + len(segments) // 8
        for index in anchors:
            edge = segments.edges[index]
            if best is not None and edge > min(best.end, best.start + 2 * MAX_SEGMENT):
                found.append(best)  # later candidates begin at another position
                at, best = best.end, None
            if edge < at or failures <= 0:
                continue
            place, failed = self._longest(segments, index, at)
            failures -= failed
            if place is not None and (best is None or place.run.tokens > best.run.tokens):
                best = place
        if best is not None:
            found.append(best)
        for place in found:
            self._use(place.run)
        return found

    def _longest(self, segments: Segments, index: int, at: int) -> tuple[Place | None, int]:
        """The longest run with segment ``index`` as anchor, at ``at`` or later, and the number of failed
        comparisons."""
        region, edge = segments.regions[index], segments.edges[index]
        failed = 0
        for run in self._anchored[segments.hash_list[index]]:
            start = edge - run.lead
            end = start + run.tokens
            if start >= at and region.start <= start and end <= region.end:
                if segments.digest(start, end) == run.digest:
                    return Place(start, end, run), failed
                failed += 1
        return None, failed

    def add(self, segments: Segments, begin: int, end: int) -> Place:
        """Add segments ``begin .. end-1`` of a prompt, at least two, as a run."""
        start, middle, stop = (segments.edges[index] for index in (begin, begin + 1, end))
        digest = segments.digest(start, stop)
        if digest not in self._runs:
            run = Run(segments.hash_list[begin + 1], middle - start, stop - start, digest)
            alike = self._anchored.get(run.anchor, [])
            if len(alike) == MAX_ALIKE:
                self._remove(min(alike, key=lambda each: each.used))
            elif len(self._runs) == MAX_RUNS:
                self._remove(next(iter(self._runs.values())))
            self._runs[digest] = run
            alike = [*self._anchored.get(run.anchor, ()), run]
            self._anchored[run.anchor] = sorted(alike, key=lambda each: -each.tokens)
        self._use(self._runs[digest])
        return Place(start, stop, self._runs[digest])

    def _use(self, run: Run) -> None:
        self._uses += 1
        run.used = self._uses
        self._runs.move_to_end(run.digest)

    def _remove(self, run: Run) -> None:
        del self._runs[run.digest]
        alike = self._anchored[run.anchor]
        alike.remove(run)
        if not alike:
            del self._anchored[run.anchor]
