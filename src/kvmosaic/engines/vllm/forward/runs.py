"""Tokens to compute, as runs of paged sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from kvmosaic.core.stand_ins import are_stand_ins
from kvmosaic.engines.vllm.forward.images import SequenceImages


class Run(NamedTuple):
    """Consecutive tokens of one paged sequence."""

    tokens: Sequence[int]
    start: int
    """Position of the first token."""
    blocks: Sequence[Sequence[int]]
    """The sequence's block ids, per KV cache group; they cover positions ``0 .. start + len(tokens) - 1``."""
    adapter_id: int = 0
    """vLLM's number of the LoRA adapter that the tokens are computed with, which is active; 0 for none."""
    images: SequenceImages | None = None
    """The images of the sequence, if it has any. Their tokens are stand-ins."""
    following: int | None = None
    """The token behind the last one, if it is known. Only some draft models read it."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def split(self, count: int) -> tuple["Run", "Run"]:
        """The first ``count`` tokens, which are not all, and the rest."""
        head = self._replace(tokens=self.tokens[:count], following=self.tokens[count])
        return head, self._replace(tokens=self.tokens[count:], start=self.start + count)


class PagedTokens(NamedTuple):
    """Tokens of one paged sequence."""

    positions: np.ndarray
    """``[tokens]`` int64, ascending where our own kernel computes attention."""
    blocks: Sequence[Sequence[int]]
    """Block ids, per KV cache group."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Runs that go through the model together, all with the same adapter. Data that several stages need is computed
    once."""

    runs: Sequence[Run]
    block_sizes: Sequence[int]
    """Tokens per block, per KV cache group."""
    device: torch.device

    @property
    def adapter_id(self) -> int:
        return self.runs[0].adapter_id

    @cached_property
    def num_tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)

    @cached_property
    def sequences(self) -> list[PagedTokens]:
        """Neighbouring runs of one sequence merged; their tokens stay in order."""
        groups = (list(group) for _, group in groupby(self.runs, key=lambda run: id(run.blocks)))
        return [
            PagedTokens(np.concatenate([np.arange(run.start, run.end) for run in runs]), runs[0].blocks)
            for runs in groups
        ]

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.array([token for run in self.runs for token in run.tokens], dtype=np.int32)

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """``[tokens]`` int32; 0 for tokens of images."""
        ids = np.where(are_stand_ins(self._tokens), np.int32(0), self._tokens) if self.has_images else self._tokens
        # An ordinary tensor, as in vLLM's own steps: torch would compile code again for tensors of inference mode.
        with torch.inference_mode(False):
            return torch.from_numpy(ids).to(self.device)

    @cached_property
    def following_ids(self) -> torch.Tensor:
        """Id of the token behind each token, ``[tokens]`` int32. Where it is not known, the token's own id."""
        ids = [
            token
            for run in self.runs
            for token in (*run.tokens[1:], run.tokens[-1] if run.following is None else run.following)
        ]
        return torch.tensor(ids, dtype=torch.int32, device=self.device)

    @cached_property
    def has_images(self) -> bool:
        """Whether some sequences have images, even if none of these tokens is an image's."""
        return any(run.images is not None for run in self.runs)

    @cached_property
    def is_image(self) -> torch.Tensor:
        """Which tokens are those of images, ``[tokens]``."""
        return torch.from_numpy(are_stand_ins(self._tokens)).to(self.device)

    def image_rows(self) -> list[torch.Tensor]:
        """Embeddings of these tokens of images, in order, each ``[tokens, hidden]``."""
        return [rows for run in self.runs if run.images is not None for rows in run.images.rows(run.start, run.end)]

    @cached_property
    def rotary_positions(self) -> torch.Tensor:
        """Positions that the model gets, ``[tokens]`` int64, or ``[axes, tokens]`` in sequences with images in which
        these differ from indices."""
        tables = [None if run.images is None else run.images.positions for run in self.runs]
        axes = max((len(table) for table in tables if table is not None), default=0)
        if not axes:
            return self.positions
        parts = [
            np.broadcast_to(np.arange(run.start, run.end), (axes, len(run.tokens)))
            if table is None
            else table[:, run.start : run.end]
            for run, table in zip(self.runs, tables, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts, axis=1)).to(self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Index of each token in its sequence, ``[tokens]`` int64."""
        return torch.from_numpy(np.concatenate([each.positions for each in self.sequences])).to(self.device)

    @cached_property
    def slots(self) -> torch.Tensor:
        """Slot of each token, per KV cache group, ``[groups, tokens]`` int64."""
        slots = [
            np.concatenate(
                [
                    np.asarray(blocks[group], dtype=np.int64)[positions // size] * size + positions % size
                    for positions, blocks in self.sequences
                ]
            )
            for group, size in enumerate(self.block_sizes)
        ]
        return torch.from_numpy(np.stack(slots)).to(self.device)


def cut(runs: Sequence[Run], room: int) -> tuple[list[Run], list[Run]]:
    """Split runs into their first ``room`` tokens and the rest."""
    first: list[Run] = []
    for index, run in enumerate(runs):
        if len(run.tokens) > room:
            if not room:
                return first, [run, *runs[index + 1 :]]
            head, rest = run.split(room)
            return [*first, head], [rest, *runs[index + 1 :]]
        first.append(run)
        room -= len(run.tokens)
    return first, []


def runs_of(
    wanted: np.ndarray,
    tokens: Sequence[int],
    blocks: Sequence[Sequence[int]],
    adapter_id: int = 0,
    images: SequenceImages | None = None,
) -> list[Run]:
    """The ``wanted`` tokens, ``[tokens]`` bool, of a sequence as runs."""
    return [
        Run(tokens[start:end], start, blocks, adapter_id, images, tokens[end] if end < len(tokens) else None)
        for start, end in _stretches(wanted)
    ]


def remaining(runs: Sequence[Run], kept: np.ndarray) -> list[Run]:
    """The ``kept`` tokens of runs, ``[tokens]`` bool, as runs."""
    parts: list[Run] = []
    at = 0
    for run in runs:
        own = kept[at : at + len(run.tokens)]
        at += len(run.tokens)
        for first, end in _stretches(own):
            following = run.tokens[end] if end < len(run.tokens) else run.following
            parts.append(run._replace(tokens=run.tokens[first:end], start=run.start + first, following=following))
    return parts


def _stretches(wanted: np.ndarray) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch of wanted tokens, ``[tokens]`` bool."""
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).tolist()
    return zip(edges[::2], edges[1::2], strict=True)


def padded(values: torch.Tensor, count: int, value: int = 0) -> torch.Tensor:
    """``[..., tokens]`` with ``count`` more tokens at the end."""
    return pad(values, (0, count), value=value) if count else values
