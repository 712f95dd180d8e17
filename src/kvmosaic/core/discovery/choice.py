"""Chooses which runs of a prompt become its chunks, or which stored pieces of a run that is not stored."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmosaic.core.discovery.runs import Place
from kvmosaic.core.discovery.segments import Segments
from kvmosaic.core.prompt import Span


@dataclass(frozen=True)
class Discovered:
    """Result of searching a prompt for runs."""

    chunks: tuple[Span, ...] = ()
    """Spans to use as chunks, ascending and not overlapping."""
    to_fill: tuple[Span, ...] = ()
    """Longer runs that are not stored yet. Until they are, their pieces are chunks."""


IsStored = Callable[[Span, int], bool]
"""Whether the tokens of a span are stored as a chunk, in a prompt whose first chunk begins at the given position."""


def choose(
    segments: Segments, shared: int, places: Sequence[Place], others: Sequence[Span], is_stored: IsStored
) -> Discovered:
    """Chunks from the runs at ``places`` (ascending), which come after the first ``shared`` segments of a prompt that
    also has the chunks ``others``. A run that is made of other runs might not be stored yet. Until it is, its stored
    pieces are used instead."""
    first = min((span.start for span in others), default=segments.edges[-1])
    at = segments.edges[shared]
    chunks: list[Span] = []
    to_fill = []
    for index, place in enumerate(places):
        pieces: list[Span] = []
        if place.run.pieces is not None and not is_stored(place.span, min(first, place.start)):
            region = segments.regions[bisect_right(segments.edges, place.start) - 1]
            end = min(region.end, places[index + 1].start) if index + 1 < len(places) else region.end
            pieces = _stored(place, Span(max(at, region.start), end), first, is_stored)
        if pieces:
            to_fill.append(place.span)
        chunks += pieces or [place.span]
        first, at = min(first, chunks[0].start), chunks[-1].end
    return Discovered(tuple(chunks), tuple(to_fill))


def _stored(place: Place, within: Span, first: int, is_stored: IsStored) -> list[Span]:
    """The stored pieces of a run, ascending and not overlapping. If two overlap, the longer one is used, because more
    of it was computed with the text before it. A piece may extend beyond the run; if this prompt has a different text
    there, the piece is not stored."""
    found: list[Span] = []
    for piece in place.run.pieces_at(place.start):
        if not within.start <= piece.start < piece.end <= within.end:
            continue
        kept = found
        if found and piece.start < found[-1].end:
            if len(piece) <= len(found[-1]):
                continue
            kept = found[:-1]
        if is_stored(piece, min(first, kept[0].start if kept else piece.start)):
            found = [*kept, piece]
    return found
