"""Runs: pieces of text that were seen behind different beginnings."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvmosaic.core.discovery.cuts import MAX_SEGMENT
from kvmosaic.core.discovery.segments import Segments
from kvmosaic.core.prompt import Span

MAX_RUNS = 2**14
"""Maximum runs that are known; the one used least recently leaves."""
MAX_ALIKE = 8
"""Maximum runs with the same second segment, so that looking for the longest is quick."""
MAX_PIECES = 16
"""Maximum pieces that a run remembers: the longest ones."""


@dataclass(eq=False, slots=True)
class Run:
    """A text that was seen behind different beginnings."""

    anchor: int
    """Hash of its second segment. Where the first one begins may depend on what stands before the run."""
    lead: int
    """Tokens before that."""
    tokens: int
    digest: int
    used: int = 0
    """When it was used last."""
    within: int = 0
    """Stands for the pieces of the longer text that it was one of when it was seen last; 0: of none."""
    pieces: "array[int] | None" = None
    """Where the runs that it was made of begin and end, from its own beginning on. One of them may begin before it or
    end behind it, and there may be smaller ones inside of it."""

    def pieces_at(self, start: int) -> list[Span]:
        """The runs that it was made of, in a prompt in which it begins at ``start``: ascending, the longest first."""
        offsets = self.pieces or ()
        return [Span(start + begin, start + end) for begin, end in zip(offsets[::2], offsets[1::2], strict=True)]


class Place(NamedTuple):
    """Tokens ``start .. end-1`` of a prompt, which are a run."""

    start: int
    end: int
    run: Run

    @property
    def span(self) -> Span:
        """The same tokens."""
        return Span(self.start, self.end)

    def remember(self, pieces: Iterable["Place"]) -> None:
        """Its run is made of ``pieces``, and of what these were made of."""
        spans = [span for piece in pieces for span in (piece.span, *piece.run.pieces_at(piece.start))]
        spans = sorted(sorted(spans, key=len)[-MAX_PIECES:], key=lambda span: (span.start, -span.end))
        self.run.pieces = array("i", [edge - self.start for span in spans for edge in (span.start, span.end)])


class Runs:
    """The runs that are known. Memory: 640 bytes for each, 10 MiB in all."""

    def __init__(self) -> None:
        self._runs: OrderedDict[int, Run] = OrderedDict()
        """By digest, the one used least recently first."""
        self._anchored: dict[int, list[Run]] = {}
        """By anchor, the longest first."""
        self._uses = 0

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, segments: Segments, first: int) -> list[Place]:
        """The runs in a prompt from segment ``first`` on: at each place the longest, then what follows it."""
        hashes, anchored = segments.hash_list, self._anchored
        anchors = [index for index in range(first, len(hashes)) if hashes[index] in anchored] if anchored else []
        found: list[Place] = []
        at = segments.edges[first]
        best: Place | None = None
        # Else prompts could be made in which everything is tried everywhere.
        failures = MAX_ALIKE + len(segments) // 8
        for index in anchors:
            edge = segments.edges[index]
            if best is not None and edge > min(best.end, best.start + 2 * MAX_SEGMENT):
                found.append(best)  # what may yet come begins at another place
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
        """The longest run that segment ``index`` is the anchor of and that does not begin before ``at``, and how many
        were tried in vain."""
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
        """Know segments ``begin .. end-1`` of a prompt, two at least, as a run from now on."""
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
