"""What earlier prompts had, in a fixed amount of memory."""

import numpy as np
import numpy.typing as npt

from kvmosaic.core.discovery.segments import Segments

HISTORY = 2**18
"""Segments that are remembered, of about 9 tokens each; the oldest leave."""
SLOTS = 2**19
"""Places of a table. One that is needed for something new forgets what it had."""
_SLOT = np.uint64(SLOTS - 1)


class History:
    """The segments of earlier prompts, one after the other, and their beginnings. Memory: 14 MiB."""

    def __init__(self, prefix_tokens: int) -> None:
        """``prefix_tokens``: tokens that the engine's own prefix cache holds. What was not seen for as many is taken
        to have left it."""
        self._prefix_tokens = prefix_tokens
        # Written at once: the first write to a page takes longer than all else that is done for a segment.
        self._hashes = np.full(HISTORY, 0, np.uint64)
        """Of segment number n at n modulo ``HISTORY``. A prompt ends with a barrier."""
        self._latest = np.full(SLOTS, 0, np.int64)
        """By hash: 1 + the number of the latest segment."""
        self._prefixes = np.full(SLOTS, 0, np.uint64)
        """By hash: that hash, of a beginning of a prompt."""
        self._seen = np.full(SLOTS, 0, np.int64)
        """And when it was seen last."""
        self._count = 0
        self._tokens = 0
        """New tokens so far: the time."""

    def shared(self, segments: Segments) -> int:
        """How many segments ``segments`` begin with that an earlier prompt began with, too."""
        slots = segments.prefixes & _SLOT
        is_seen = self._prefixes[slots] == segments.prefixes
        is_seen &= self._seen[slots] + self._prefix_tokens > self._tokens
        places = np.flatnonzero(is_seen)
        return int(places[-1]) + 1 if len(places) else 0

    def stretches(self, segments: Segments, first: int, shortest: int) -> list[tuple[int, int]]:
        """Which segments from ``first`` on are consecutive in one earlier prompt, too, with ``shortest`` tokens
        at least: ``(begin, end)``, ascending, none overlapping."""
        hashes = segments.hashes[first:]
        places = self._latest[hashes & _SLOT] - 1
        is_known = (places >= max(0, self._count - HISTORY)) & (hashes > 0)
        is_known &= self._hashes[places % HISTORY] == hashes
        if not is_known.any():
            return []
        numbers = self._bridged(np.where(is_known, places, -1), hashes)
        return [
            (first + begin, first + end)
            for begin, end in self._followed(numbers, segments.hash_list[first:])
            if segments.edges[first + end] - segments.edges[first + begin] >= shortest
        ]

    def _bridged(self, numbers: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """``numbers``, also of segments that the tables forgot, where those before or behind them tell."""
        indices = np.arange(len(numbers))
        before = np.maximum.accumulate(np.where(numbers >= 0, indices, -1))
        behind = np.minimum.accumulate(np.where(numbers >= 0, indices, len(numbers))[::-1])[::-1]
        for sources, is_there in ((before, before >= 0), (behind % len(numbers), behind < len(numbers))):
            lost = np.flatnonzero((numbers < 0) & is_there & (hashes > 0))
            supposed = numbers[sources[lost]] + lost - sources[lost]
            is_equal = (supposed >= max(0, self._count - HISTORY)) & (supposed < self._count)
            is_equal &= self._hashes[supposed % HISTORY] == hashes[lost]
            numbers[lost[is_equal]] = supposed[is_equal]
        return numbers

    def _followed(self, numbers: npt.NDArray[np.int64], hashes: list[int]) -> list[tuple[int, int]]:
        """Where segments stand that follow each other in the history, too. ``numbers``: there, of the latest that
        equals each, or -1. One in the middle may have a later equal elsewhere."""
        # What the numbers alone tell to be of one kind is taken in one go.
        breaks = np.flatnonzero((numbers[1:] != numbers[:-1] + 1) & ((numbers[1:] >= 0) | (numbers[:-1] >= 0))) + 1
        ends = np.concatenate((breaks, [len(numbers)]))
        until = np.repeat(ends, np.diff(ends, prepend=0)).tolist()
        latest = numbers.tolist()
        remembered = self._hashes.item
        found = []
        begin = expected = -1
        at = 0
        while at < len(hashes):
            if begin >= 0 and latest[at] != expected:
                if hashes[at] and expected < self._count and remembered(expected % HISTORY) == hashes[at]:
                    expected += 1
                    at += 1
                    continue
                found.append((begin, at))
                begin = -1
            if begin < 0 and latest[at] >= 0:
                begin = at
                expected = latest[at]
            expected += until[at] - at
            at = until[at]
        return found  # the last segment is a barrier, so nothing is left open

    def add(self, segments: Segments, shared: int) -> None:
        """Remember a prompt, of which the first ``shared`` segments are those of an earlier one."""
        new = segments.hashes[shared:][-HISTORY:]
        numbers = np.arange(self._count, self._count + len(new))
        self._hashes[numbers % HISTORY] = new
        self._latest[new & _SLOT] = numbers + 1  # what barriers write is never read
        self._count += len(new)
        self._tokens += segments.edges[-1] - segments.edges[shared]
        slots = segments.prefixes & _SLOT
        self._prefixes[slots] = segments.prefixes
        self._seen[slots] = self._tokens
