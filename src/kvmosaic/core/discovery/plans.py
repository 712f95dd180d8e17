"""What became of the beginnings of prompts, so that the same beginning is always treated alike."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from kvmosaic.core.discovery.segments import Segments
from kvmosaic.core.prompt import Span

MAX_PLANS = 2**15
"""Maximum chunks that are remembered with all that stood before them; the one met least recently leaves."""


class Plans:
    """Which runs prompts had, each with all that stood before it. Where chunks are changes KV, and with it the hashes
    by which an engine's own prefix cache finds blocks: a prompt that goes on where another ended has to have the same
    chunks up to there. Memory: 256 bytes for each, 8 MiB in all."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, Span] = OrderedDict()
        """By the hash of a prompt up to a segment's end: the chunk that ends in that segment."""

    def __len__(self) -> int:
        return len(self._plans)

    def known(self, segments: Segments, shared: int) -> list[Span]:
        """The chunks in the first ``shared`` segments: those that an earlier prompt had there."""
        chunks = []
        at = 0
        for index, digest in enumerate(segments.prefixes[:shared].tolist()):
            span = self._plans.get(digest)
            if span is None or not segments.hashes[index]:  # a barrier is a region of its own
                continue
            self._plans.move_to_end(digest)
            region = segments.regions[index]  # there may be other barriers now
            if max(at, region.start) <= span.start and span.end <= region.end:
                chunks.append(span)
                at = span.end
        return chunks

    def add(self, segments: Segments, shared: int, chunks: Sequence[Span]) -> None:
        """A prompt has ``chunks`` behind its first ``shared`` segments, and no others there."""
        prefixes = segments.prefixes.tolist()
        for digest in prefixes[shared:]:
            if digest in self._plans:
                del self._plans[digest]
        for span in chunks:
            self._plans[prefixes[bisect_left(segments.edges, span.end) - 1]] = span
        while len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
