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

_FIRST, _SECOND, _MIX = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93))
_SHIFT = np.uint64(32)
_MOST = 2**32 - 1


class Cuts(NamedTuple):
    """A prompt as consecutive segments. Segments with tokens that no run may contain are *barriers*."""

    edges: npt.NDArray[np.int64]
    """Start of each segment, then the prompt's length."""
    is_barrier: npt.NDArray[np.bool_]

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
        regions = self._regions(tokens, covered)
        edges = [np.zeros(1, np.int64)]
        flags = [np.zeros(0, np.bool_)]
        end = 0
        for (start, stop), is_cut in zip(regions, _chosen(tokens, regions), strict=True):
            if start > end:
                edges.append(np.array([start]))
                flags.append(np.ones(1, np.bool_))
            inner = np.flatnonzero(is_cut[1:]) + start + 1
            inside = _bounded(np.concatenate((inner, [stop])), start)
            edges.append(inside)
            flags.append(np.zeros(len(inside), np.bool_))
            end = stop
        edges.append(np.array([len(tokens)]))
        flags.append(np.ones(1, np.bool_))
        return Cuts(np.concatenate(edges), np.concatenate(flags))

    def _regions(self, tokens: npt.NDArray[np.int64], covered: Sequence[Span]) -> list[tuple[int, int]]:
        """Ranges that may contain runs, ascending."""
        is_free = np.zeros(len(tokens) + 2, np.bool_)  # with a border on either side
        is_free[1:-1] = ~self._is_marker[np.clip(tokens, 0, len(self._is_marker) - 1)]
        is_free[-2] = False
        for span in covered:
            is_free[span.start + 1 : span.end + 1] = False
        borders = np.flatnonzero(is_free[1:] != is_free[:-1])
        starts, stops = borders[::2], borders[1::2]
        long = stops - starts >= self._shortest
        return list(zip(starts[long].tolist(), stops[long].tolist(), strict=True))


def _chosen(tokens: npt.NDArray[np.int64], regions: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.bool_]]:
    """For each region, whether a segment begins at each of its tokens: if the hash of the token and its predecessor
    is less than the hashes of its neighbours. Neighbours behind a region's border do not count: a conversation that
    continues must have the same cuts before the border. The hash is not secret, because engines that share a store
    should find the same runs. Clients that choose tokens can neither increase the number of cuts beyond the limit nor
    place them where they are expensive."""
    values = tokens.astype(np.uint64) * _SECOND
    values[1:] += tokens[:-1].astype(np.uint64) * _FIRST
    values ^= values >> _SHIFT
    values *= _MIX
    short = (values >> _SHIFT).astype(np.uint32)
    starts = np.array([0, *(stop - start + REACH for start, stop in regions)]).cumsum().tolist()
    apart = np.full(starts[-1] + REACH, _MOST, np.uint32)  # all regions, with borders between them
    for at, (start, stop) in zip(starts, regions, strict=False):
        apart[REACH + at : REACH + at + stop - start] = short[start:stop]
    least = apart[: len(apart) - REACH + 1].copy()  # minimum of the REACH hashes from each index on
    for shift in range(1, REACH):
        np.minimum(least, apart[shift : shift + len(least)], out=least)
    hashes = apart[REACH : len(apart) - REACH]
    is_chosen = (hashes < least[: len(hashes)]) & (hashes < least[REACH + 1 :])
    return [is_chosen[at : at + stop - start] for at, (start, stop) in zip(starts, regions, strict=False)]


def _bounded(ends: npt.NDArray[np.int64], start: int) -> npt.NDArray[np.int64]:
    """``ends`` of consecutive segments, the first of which begins at ``start``, with long segments split."""
    begins = np.concatenate(([start], ends[:-1]))
    long = np.flatnonzero(ends - begins > MAX_SEGMENT)
    if not len(long):
        return ends
    more = [np.arange(begins[index] + MAX_SEGMENT, ends[index], MAX_SEGMENT) for index in long]
    return np.sort(np.concatenate((ends, *more)))
