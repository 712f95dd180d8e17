"""Cuts prompts into segments. Only the tokens decide where, so the same text has the same cuts at any position."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvmosaic.core.prompt import Span

REACH = 4
"""Number of tokens on either side that a cut depends on. Two cuts are more than this many tokens apart."""
MAX_SEGMENT = 32
"""Maximum length of a segment, in tokens. Longer ones are split: one repeated token has no cuts of its own."""
ENDING = 32
"""Number of tokens at the end of a message that no new run contains. They are usually a question."""

_FIRST, _SECOND, _MIX = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))
_SHIFT = np.uint64(32)
_MOST = 2**32 - 1


class Cuts(NamedTuple):
    """A prompt as consecutive segments. Segments with tokens that no run may contain are *barriers*."""

    edges: npt.NDArray[np.int64]
    """Start of each segment, then the prompt's length."""
    is_barrier: npt.NDArray[np.bool_]
    limits: npt.NDArray[np.int64]
    """For each segment, the position where new runs of its region have to end. A question may recur together with the
    document before it. As a part of a run, it would not have seen the other documents."""

    def regions(self) -> list[Span]:
        """For each segment, the surrounding tokens up to the nearest barriers. For a barrier, the barrier itself."""
        first = self.is_barrier | np.concatenate(([True], self.is_barrier[:-1]))
        starts = np.flatnonzero(first)
        counts = np.diff(starts, append=len(self.is_barrier)).tolist()
        borders = [*self.edges[starts].tolist(), int(self.edges[-1])]
        regions = []
        for index, count in enumerate(counts):
            regions += [Span(borders[index], borders[index + 1])] * count
        return regions


class Cutter:
    """Cuts prompts at some of their tokens, and on both sides of tokens that no run may contain."""

    def __init__(self, markers: Iterable[int], shortest: int) -> None:
        """``markers``: ids of tokens between the turns of a conversation. ``shortest``: minimum tokens of a run."""
        self._shortest = shortest
        known = sorted(marker for marker in markers if marker >= 0)
        self._is_marker = np.zeros(known[-1] + 2 if known else 1, np.bool_)  # the last item stands for all larger ids
        self._is_marker[known] = True

    def cut(self, tokens: npt.NDArray[np.int64], covered: Sequence[Span]) -> Cuts:
        """The segments of a prompt. No run may contain a marker, a token of ``covered``, or the last token, which is
        left to prefill. Text between these that is too short for a run becomes part of the barrier. This bounds the
        number of segments to about a fifth of the number of tokens, whatever clients send."""
        starts, stops, limits = self._regions(tokens, covered)
        ends = np.array([0, len(tokens)])
        edges = np.sort(np.concatenate((ends, starts, stops, _chosen(tokens, starts, stops))))
        edges = edges[np.concatenate(([True], edges[1:] > edges[:-1]))]
        region = starts.searchsorted(edges[:-1], side="right") - 1
        is_barrier = (region < 0) | (edges[:-1] >= stops.take(region, mode="clip")) if len(starts) else region < 0
        long = np.flatnonzero((edges[1:] - edges[:-1] > MAX_SEGMENT) & ~is_barrier)
        if len(long):
            more = [np.arange(edges[index] + MAX_SEGMENT, edges[index + 1], MAX_SEGMENT) for index in long.tolist()]
            is_barrier = np.insert(is_barrier, np.repeat(long, [len(each) for each in more]), values=False)
            edges = np.sort(np.concatenate((edges, *more)))
        region = starts.searchsorted(edges[:-1], side="right") - 1
        return Cuts(edges, is_barrier, limits[region] if len(limits) else np.zeros(len(region), np.int64))

    def _regions(
        self, tokens: npt.NDArray[np.int64], covered: Sequence[Span]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Starts and ends of the ranges that may contain runs, and where new runs in them have to end; ascending."""
        is_text = np.zeros(len(tokens) + 2, np.bool_)  # with a border on either side
        np.logical_not(self._is_marker.take(tokens, mode="clip"), out=is_text[1:-1])
        is_text[-2] = False
        is_free = is_text.copy()
        for span in covered:
            is_free[span.start + 1 : span.end + 1] = False
        borders = np.flatnonzero(is_free[1:] != is_free[:-1])
        starts, stops = borders[::2], borders[1::2]
        long = stops - starts >= self._shortest
        starts, stops = starts[long], stops[long]
        is_ending = ~is_text[stops + 1]  # text before a covered span is in the middle of a message
        return starts, stops, stops - ENDING * is_ending


def _chosen(
    tokens: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The tokens at which a segment begins, of those in the regions between ``starts`` and ``stops``: those whose
    hash with their predecessor is less than the hashes of their neighbours. Neighbours behind a region's border do
    not count: a conversation that continues must have the same cuts before the border. The hash is not secret,
    because engines that share a store should find the same runs. Clients that choose tokens can neither increase the
    number of cuts beyond the limit nor place them where they are expensive."""
    values = tokens.astype(np.uint64)
    firsts = values * _FIRST
    values *= _SECOND
    values[1:] += firsts[:-1]
    values ^= values >> _SHIFT
    values *= _MIX
    short = (values >> _SHIFT).astype(np.uint32)
    places = REACH + (stops - starts + REACH).cumsum() - (stops - starts + REACH)
    apart = np.full(
        int((stops - starts + REACH).sum()) + REACH, _MOST, np.uint32
    )  # regions, with borders between them
    for place, start, stop in zip(places.tolist(), starts.tolist(), stops.tolist(), strict=True):
        apart[place : place + stop - start] = short[start:stop]
    pairs = np.minimum(apart[:-1], apart[1:])
    least = np.minimum(pairs[:-2], pairs[2:])  # of the REACH hashes from each index on
    hashes = apart[REACH : len(apart) - REACH]
    is_chosen = (hashes < least[: len(hashes)]) & (hashes < least[REACH + 1 :])
    chosen = np.flatnonzero(is_chosen) + REACH
    region = places.searchsorted(chosen, side="right") - 1
    begins: npt.NDArray[np.int64] = chosen - places[region] + starts[region]
    return begins
