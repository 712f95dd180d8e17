"""Which runs of a prompt become its chunks: those that are stored, or their pieces that are."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmosaic.core.discovery.runs import Place
from kvmosaic.core.discovery.segments import Segments
from kvmosaic.core.prompt import Span


@dataclass(frozen=True)
class Discovered:
    """What was found in a prompt."""

    chunks: tuple[Span, ...] = ()
    """Its runs, ascending, none overlapping."""
    to_fill: tuple[Span, ...] = ()
    """Longer runs that nobody has stored yet: for now, their pieces are chunks."""


IsStored = Callable[[Span, int], bool]
"""Whether a span's tokens are stored as a chunk, in a prompt whose first chunk begins at a position."""


def choose(
    segments: Segments, shared: int, places: Sequence[Place], others: Sequence[Span], is_stored: IsStored
) -> Discovered:
    """What to use of the runs at ``places``, ascending, behind the first ``shared`` segments, in a prompt with
    ``others`` as chunks. A run that is made of others is new to the store. Until it is stored, those of its pieces
    are used that are."""
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
    """The pieces of a run that are stored, ascending, none overlapping. Where one reaches out of the run, what is
    there may be another text, which is not stored."""
    found: list[Span] = []
    at = within.start
    for piece in place.run.pieces_at(place.start):
        if at <= piece.start and piece.end <= within.end and is_stored(piece, min(first, piece.start)):
            found.append(piece)
            first, at = min(first, piece.start), piece.end
    return found
