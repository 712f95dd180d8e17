"""Remembers the chunks in the beginnings of prompts, so that the same beginning is always treated alike."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from kvmosaic.core.discovery.segments import Segments
from kvmosaic.core.prompt import Span

MAX_PLANS = 2**15
"""Maximum number of remembered chunks, each with all text before it. The least recently used one is evicted."""


class Plans:
    """The chunks of prompts, each with all text before it. The positions of chunks change the KV, and so the hashes
    by which an engine's own prefix cache finds blocks. A prompt that continues another one must therefore have the
    same chunks up to there. Memory: 256 bytes per chunk, 8 MiB in all."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, Span] = OrderedDict()
        """By the hash of a prompt up to the end of a segment: the chunk that ends in that segment."""

    def __len__(self) -> int:
        return len(self._plans)

    def known(self, segments: Segments, shared: int) -> list[Span]:
        """The chunks that an earlier prompt had in the first ``shared`` segments."""
        chunks = []
        at = 0
        for index, digest in enumerate(segments.prefixes[:shared].tolist()):
            span = self._plans.get(digest)
            if span is None or not segments.hashes[index]:  # a barrier is a region of its own
                continue
            self._plans.move_to_end(digest)
            region = segments.regions[index]  # barriers may be elsewhere in this prompt
            if max(at, region.start) <= span.start and span.end <= region.end:
                chunks.append(span)
                at = span.end
        return chunks

    def add(self, segments: Segments, shared: int, chunks: Sequence[Span]) -> None:
        """Remember that a prompt has exactly ``chunks`` after its first ``shared`` segments."""
        prefixes = segments.prefixes.tolist()
        for digest in self._plans.keys() & prefixes[shared:]:
            del self._plans[digest]
        for span in chunks:
            self._plans[prefixes[bisect_left(segments.edges, span.end) - 1]] = span
        while len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
