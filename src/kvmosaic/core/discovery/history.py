"""Segments and beginnings of earlier prompts, in a fixed amount of memory."""

import numpy as np
import numpy.typing as npt

from kvmosaic.core.discovery.segments import Segments

HISTORY = 2**18
"""Maximum number of remembered segments, of about 9 tokens each. The oldest are evicted."""
SLOTS = 2**19
"""Number of slots of a hash table. A new item replaces the old item of its slot."""
_SLOT = np.uint64(SLOTS - 1)


class History:
    """The segments of earlier prompts in order, and the beginnings of these prompts. Memory: 14 MiB."""

    def __init__(self, prefix_tokens: int) -> None:
        """``prefix_tokens``: capacity of the engine's own prefix cache, in tokens. A beginning is assumed to be
        evicted from that cache once this many new tokens have come since it was last seen."""
        self._prefix_tokens = prefix_tokens
        # Filled here, because the first write to a page takes longer than all other work for a segment.
        self._hashes = np.full(HISTORY, 0, np.uint64)
        """Hash of segment number n, at index n modulo ``HISTORY``. The last segment of a prompt is a barrier."""
        self._latest = np.full(SLOTS, 0, np.int64)
        """By hash of a segment: 1 + the number of the latest such segment."""
        self._prefixes = np.full(SLOTS, 0, np.uint64)
        """By hash of a prompt's beginning: that hash."""
        self._seen = np.full(SLOTS, 0, np.int64)
        """By hash of a prompt's beginning: value of ``_tokens`` when it was last seen."""
        self._count = 0
        self._tokens = 0
        """Number of new tokens so far, used as a clock."""

    def shared(self, segments: Segments) -> int:
        """Number of leading segments that an earlier prompt also began with."""
        slots = segments.prefixes & _SLOT
        is_seen = self._prefixes[slots] == segments.prefixes
        is_seen &= self._seen[slots] + self._prefix_tokens > self._tokens
        places = np.flatnonzero(is_seen)
        return int(places[-1]) + 1 if len(places) else 0

    def stretches(self, segments: Segments, first: int, shortest: int) -> list[tuple[int, int]]:
        """Ranges ``(begin, end)`` of segments from ``first`` on that are also consecutive in an earlier prompt and
        have at least ``shortest`` tokens. Ascending and not overlapping."""
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
        """``numbers``, completed for segments that the table lost, if the numbers of their neighbours allow it."""
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
        """Ranges of segments that also follow each other in the history. ``numbers``: for each segment, the number of
        the latest equal segment in the history, or -1. That may be elsewhere for a segment in the middle of a
        range."""
        # Segments with consecutive numbers, or with none, are handled in one step.
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
        return found  # the last segment is a barrier, which ends any range

    def add(self, segments: Segments, shared: int) -> None:
        """Remember a prompt that shares its first ``shared`` segments with an earlier one."""
        new = segments.hashes[shared:][-HISTORY:]
        numbers = np.arange(self._count, self._count + len(new))
        self._hashes[numbers % HISTORY] = new
        self._latest[new & _SLOT] = numbers + 1  # values written for barriers are never read
        self._count += len(new)
        self._tokens += segments.edges[-1] - segments.edges[shared]
        slots = segments.prefixes & _SLOT
        self._prefixes[slots] = segments.prefixes
        self._seen[slots] = self._tokens
