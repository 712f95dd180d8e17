"""Moves rotated keys from the position where they were computed to the position where they are used.

A rotary model turns column pair ``i`` of a key at position ``p`` by ``M(p) = [[c, -s], [s, c]]``, with
``c, s`` row ``p`` of the model's own table. The move is ``M(new) @ M(old)^-1``: one turn per token and pair,
computed from two rows of that table. It does not depend on how the table was computed. It is therefore exact for
linear, NTK, llama3, YaRN and longrope scaling, for a scale folded into the table (mscale), for tables rounded to half
precision, and for tables that change with the sequence length.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch


class CosSin(NamedTuple):
    """Rows of a rotary table at some positions: each ``[tokens, pairs]``, fp32."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class RotaryColumns:
    """The columns of a cached row that rotate: ``width`` columns from ``start`` on, of K (or, for MLA, of V)."""

    part: Literal["k", "v"]
    start: int
    width: int
    interleaved: bool
    """Whether pairs are neighbours ``(0, 1), (2, 3), …`` instead of halves ``(0, w/2), (1, w/2 + 1), …``."""

    def __post_init__(self) -> None:
        assert self.width % 2 == 0


def rotation_between(old: CosSin, new: CosSin) -> CosSin:
    """The turn that takes keys from the ``old`` rows to the ``new`` rows, per token and pair."""
    norm = old.cos.square() + old.sin.square()
    cos = (new.cos * old.cos + new.sin * old.sin) / norm
    sin = (new.sin * old.cos - new.cos * old.sin) / norm
    return CosSin(cos, sin)


def rotate_(rows: torch.Tensor, turn: CosSin, columns: RotaryColumns) -> None:
    """Turn ``rows`` ``[..., tokens, dim]`` in place; the arithmetic is fp32 for any dtype."""
    active = rows[..., columns.start : columns.start + columns.width]
    if columns.interleaved:
        first, second = active[..., 0::2], active[..., 1::2]
    else:
        first, second = active[..., : columns.width // 2], active[..., columns.width // 2 :]
    a, b = first.float(), second.float()
    turned = a * turn.cos
    turned.addcmul_(b, turn.sin, value=-1)
    second.copy_((b * turn.cos).addcmul_(a, turn.sin))
    first.copy_(turned)


def rotated(rows: torch.Tensor, turn: CosSin, columns: RotaryColumns) -> torch.Tensor:
    """``rows`` ``[..., tokens, dim]`` turned, as a new tensor that can be differentiated."""
    end = columns.start + columns.width
    active = rows[..., columns.start : end].float()
    a, b = (active[..., 0::2], active[..., 1::2]) if columns.interleaved else active.chunk(2, dim=-1)
    pair = a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin
    turned = torch.stack(pair, dim=-1).flatten(-2) if columns.interleaved else torch.cat(pair, dim=-1)
    return torch.cat([rows[..., : columns.start], turned.to(rows.dtype), rows[..., end:]], dim=-1)
