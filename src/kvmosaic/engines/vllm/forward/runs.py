"""Tokens to compute, as runs of paged sequences."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """A run of consecutive tokens of one paged sequence."""

    tokens: Sequence[int]
    start: int
    """Position of the first token."""
    blocks: Sequence[Sequence[int]]
    """The sequence's block ids, per KV cache group; they cover positions ``0 .. start + len(tokens) - 1``."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class PagedTokens(NamedTuple):
    """Tokens of one paged sequence."""

    positions: np.ndarray
    """``[tokens]`` int64, ascending."""
    blocks: Sequence[Sequence[int]]
    """Per KV cache group."""


def cut(rows: Sequence[Row], room: int) -> tuple[list[Row], list[Row]]:
    """The first ``room`` tokens of some rows, and the others."""
    first: list[Row] = []
    for index, row in enumerate(rows):
        if len(row.tokens) > room:
            head = [Row(row.tokens[:room], row.start, row.blocks)] if room else []
            tail = Row(row.tokens[room:], row.start + room, row.blocks)
            return first + head, [tail, *rows[index + 1 :]]
        first.append(row)
        room -= len(row.tokens)
    return first, []


def by_sequence(rows: Sequence[Row]) -> list[PagedTokens]:
    """Neighbouring rows of one sequence put together; their tokens stay in order."""
    return [
        PagedTokens(np.concatenate([np.arange(row.start, row.end) for row in run]), run[0].blocks)
        for run in (list(group) for _, group in groupby(rows, key=lambda row: id(row.blocks)))
    ]
