"""Runs: pieces of text that were seen behind different beginnings."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from kvmosaic.core.discovery.segments import Segments

MAX_RUNS = 2**14
"""Maximum runs that are known; the one used least recently leaves."""
MAX_ALIKE = 8
"""Maximum runs with the same second segment, so that looking for the longest is quick."""


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


class Place(NamedTuple):
    """Tokens ``start .. end-1`` of a prompt, which are a run."""

    start: int
    end: int
    run: Run


class Runs:
    """The runs that are known. Memory: 512 bytes for each, 8 MiB in all."""

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
        found = []
        at = segments.edges[first]
        tries = MAX_ALIKE + len(segments) // 8  # else prompts could be made in which everything is tried everywhere
        for index in anchors:
            if segments.edges[index] < at:
                continue
            region = segments.regions[index]
            for run in anchored[hashes[index]]:
                start = segments.edges[index] - run.lead
                end = start + run.tokens
                if start < max(at, region.start) or end > region.end:
                    continue
                if segments.digest(start, end) == run.digest:
                    found.append(Place(start, end, run))
                    self._use(run)
                    at = end
                    break
                tries -= 1
            if tries <= 0:
                break
        return found

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
