"""Finds texts in another one: all at once, in linear time."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

WINDOW = 8
"""Size of the windows that locate candidate positions of a text, in bytes: one 64-bit number."""
STRIDE = 8
"""Distance between the windows of the text that are compared, in bytes. One of any ``STRIDE`` consecutive windows of
a needle is compared at each of its occurrences."""
TRIED = 9
"""Number of places that are tried in a needle whose middle is not rare. The rarest one becomes its anchor."""
RARE = 4
"""Maximum number of compared windows of the text that a rare place may match."""
MAX_WORK = 8
"""Comparison budget, per byte of both texts."""
COMPARISON = 64
"""Number of bytes that are compared first, and the cost of that comparison."""
BLOCK = 2**20
"""Maximum number of matching windows that are in memory at a time, except those of one window."""

_BITS = 16
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Needle:
    """A text that is searched for."""

    __slots__ = ("bytes", "head", "work")

    def __init__(self, text: str) -> None:
        self.bytes = text.encode(errors="surrogatepass")
        self.head = self.bytes[:COMPARISON]
        self.work = 0
        """Remaining comparison budget; negative if the search was given up."""

    @property
    def is_known(self) -> bool:
        """Whether the search found all its occurrences."""
        return self.work >= 0


AnyNeedle = TypeVar("AnyNeedle", bound=Needle)


def occurrences(text: bytes, needles: Sequence[AnyNeedle], size: int) -> list[tuple[int, AnyNeedle]]:
    """Occurrences of ``needles`` in ``text``, with their byte offsets. Needles of fewer than :data:`WINDOW` bytes are
    not found. ``size``: number of bytes that ``text`` counts as. If ``text`` resembles a needle almost everywhere,
    the search for that needle stops early."""
    needles = [needle for needle in needles if WINDOW <= len(needle.bytes) <= len(text)]
    least = WINDOW + STRIDE - 1
    places = []
    for stride, some in (
        (STRIDE, [needle for needle in needles if len(needle.bytes) >= least]),
        (1, [needle for needle in needles if len(needle.bytes) < least]),
    ):
        for needle in some:
            needle.work = MAX_WORK * (size // len(needles) + len(needle.bytes))
        if some:
            places += _find(text, some, size, stride)
    return places


def _find(text: bytes, needles: Sequence[AnyNeedle], size: int, stride: int) -> list[tuple[int, AnyNeedle]]:
    """Occurrences of ``needles``. Compares every ``stride``-th window of ``text`` with ``stride`` consecutive windows
    of each needle, one of which is among those of the text."""
    windows = _windows(text)
    compared = windows[::stride]
    slots = _slots(compared)
    anchors = _Anchors(needles, stride)
    candidates = anchors.candidates(slots)
    if len(candidates) > RARE * len(needles) + len(slots) // 64:
        anchors.move_to_rare_places(np.bincount(slots, minlength=1 << _BITS))
        candidates = anchors.candidates(slots)
    is_cut = len(candidates) > size
    candidates = candidates[:size]
    budgets = np.fromiter((needle.work // WINDOW for needle in needles), np.int64, len(needles))
    found = []
    for places, owners in anchors.matches(candidates * stride, compared[candidates], budgets):
        # Most places that are no occurrence differ in the first window. For negative places, which are before the
        # text, NumPy reads a window at its end.
        is_alike = (windows[places] == anchors.heads[owners]) & (places >= 0)
        for place, owner in zip(places[is_alike].tolist(), owners[is_alike].tolist(), strict=True):
            needle = needles[owner]
            if needle.work >= 0:
                needle.work -= COMPARISON
                if text.startswith(needle.head, place):
                    needle.work -= len(needle.bytes)
                    if text.startswith(needle.bytes, place):
                        found.append((place, needle))
    for index in anchors.common:
        needles[index].work = -1
    if is_cut:
        for needle in needles:
            needle.work = -1
    return found


class _Anchors:
    """The anchor of each needle: a place of ``stride`` consecutive windows, at first the one in the middle."""

    def __init__(self, needles: Sequence[Needle], stride: int) -> None:
        self._stride = stride
        self._steps = np.arange(stride)
        sizes = np.fromiter((len(needle.bytes) for needle in needles), np.int64, len(needles))
        self._starts = sizes.cumsum() - sizes
        self._room = sizes - (WINDOW + stride - 1)
        self._windows = _windows(b"".join([needle.bytes for needle in needles]))
        self.heads = self._windows[self._starts]
        """The first window of each needle."""
        self.common: list[int] = []
        """Indices of the needles that had too many matches."""
        self._owners = np.arange(len(needles))
        self._places = self._room // 2
        self._anchors = self._windows[(self._starts + self._places)[:, None] + self._steps]

    def candidates(self, slots: np.ndarray) -> np.ndarray:
        """Indices of the windows that may be in an anchor, by their ``slots``."""
        is_wanted = np.zeros(1 << _BITS, dtype=bool)
        is_wanted[_slots(self._anchors)] = True
        return np.flatnonzero(is_wanted.take(slots))

    def move_to_rare_places(self, counts: np.ndarray) -> None:
        """Move the anchors that are not rare. ``counts``: number of the windows that are compared, in each slot. A
        needle is dropped if one of its places does not occur."""
        found = counts[_slots(self._anchors)].sum(axis=1)
        common = np.flatnonzero(found > RARE)
        # Places evenly spread from the beginning of each needle to its end.
        tried = self._room[common, None] * np.arange(TRIED) // (TRIED - 1)
        windows = self._windows[(self._starts[common, None] + tried)[:, :, None] + self._steps]
        totals = counts[_slots(windows)].sum(axis=2)
        best = np.arange(len(common)), totals.argmin(axis=1)
        self._places[common], self._anchors[common], found[common] = tried[best], windows[best], totals[best]
        self._owners = np.flatnonzero(found)
        self._places, self._anchors = self._places[self._owners], self._anchors[self._owners]

    def matches(
        self, places: np.ndarray, windows: np.ndarray, budgets: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Where needles begin whose anchors equal ``windows``, which are at ``places`` of the text, and for each the
        index of its needle; in blocks. Needles with more matches than their ``budgets`` are left out."""
        anchors = self._anchors.ravel()
        order = anchors.argsort()
        rows = order // self._stride
        anchors, owners, offsets = anchors[order], self._owners[rows], self._places[rows] + order % self._stride
        # The anchors that are equal to each window are consecutive.
        firsts, lasts = anchors.searchsorted(windows), anchors.searchsorted(windows, side="right")
        size = len(anchors) + 1
        uses = (np.bincount(firsts, minlength=size) - np.bincount(lasts, minlength=size)).cumsum()[:-1]
        is_common = np.bincount(owners, uses, len(budgets)) > budgets
        if is_common.any():
            self.common = np.flatnonzero(is_common).tolist()
            is_kept = ~is_common[owners]
            anchors, owners, offsets = anchors[is_kept], owners[is_kept], offsets[is_kept]
            firsts, lasts = anchors.searchsorted(windows), anchors.searchsorted(windows, side="right")
        counts = lasts - firsts
        ends = counts.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        cuts = [*ends.searchsorted(np.arange(0, total, BLOCK), side="right").tolist(), len(ends)]
        for low, high in pairwise(cuts):
            some = counts[low:high]
            starts = firsts[low:high] - some.cumsum() + some
            equal = np.arange(some.sum()) + starts.repeat(some)
            yield places[low:high].repeat(some) - offsets[equal], owners[equal]


def _windows(text: bytes) -> np.ndarray:
    """The window that begins at each byte of a text, as a number."""
    return np.ndarray((len(text) - WINDOW + 1,), "<u8", text, strides=(1,))


def _slots(windows: np.ndarray) -> np.ndarray:
    return ((windows * _SPREAD) >> np.uint64(64 - _BITS)).view(np.int64)
