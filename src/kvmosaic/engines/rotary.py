"""Measures which cached columns of a model rotate, how, and by which table.

Model classes differ in where they keep rotary tables, in how they pair columns, and in what they cache
(MLA caches a latent and rotates only its last columns). Instead of knowing each class by name, we compute the same
tokens at two positions and look for the turn that explains the difference, layer by layer. A model whose keys move in
any other way (learned or absolute positions, FoPE, dual-chunk) is detected here.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, Protocol

import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.core.rotation import CosSin, RotaryColumns, rotate_, rotation_between
from kvmosaic.kernels.remap import LayerTurn


class RotaryTable(Hashable, Protocol):
    """One rotary table of a model."""

    def rows(self, positions: Sequence[int], sequence_length: int) -> CosSin:
        """Table rows at ``positions`` as the model makes them for a prompt of ``sequence_length`` tokens."""
        ...


@dataclass(frozen=True)
class LayerRotary:
    """How one layer's cached rows depend on position."""

    table: RotaryTable
    columns: RotaryColumns


Rows = tuple[torch.Tensor, torch.Tensor]
"""K ``[heads, tokens, k_dim]`` and V ``[heads, tokens, v_dim]`` of one layer."""


def explain_layer(
    layer: int,
    at_old: Rows,
    at_new: Rows,
    old: range,
    new: range,
    tables: Sequence[RotaryTable],
    *,
    is_quantised: bool = False,
) -> LayerRotary | None:
    """The turn from the rows computed at ``old`` to those at ``new``; ``None`` when nothing has to turn.
    ``is_quantised``: attention saw rounded keys, and turned ones are rounded differently."""
    length = max(old.stop, new.stop)
    # GPUs may compute float32 attention in TF32, which has no more bits than half precision.
    exact = at_old[0].dtype == torch.float32 and at_old[0].device.type == "cpu" and not is_quantised
    # The right turn is off by rounding only; a wrong pairing is off by tens of percent.
    tolerance = 1e-3 if exact else 5e-2
    # The first layer's input is the same at both positions. In later layers, rounding errors may have grown until
    # some rows have different inputs. The part that does not turn (K or V) shows which rows have the same input.
    every = torch.ones(len(old), dtype=torch.bool, device=at_old[0].device)
    same_k, same_v = (
        every if exact or layer == 0 else _same_rows(a, b, tolerance / 2) for a, b in zip(at_old, at_new, strict=True)
    )
    without = _distance(at_old, at_new, same_v)
    best: tuple[float, LayerRotary | None] = (without, None)
    for table in tables:
        turn = rotation_between(table.rows(old, length), table.rows(new, length))
        for columns in _column_choices(2 * turn.cos.shape[-1], at_old):
            moved = (at_old[0].clone(), at_old[1].clone())
            turned, telling = (moved[0], same_v) if columns.part == "k" else (moved[1], same_k)
            rotate_(turned, turn, columns)
            found = _distance(moved, at_new, telling), LayerRotary(table, columns)
            best = min(best, found, key=lambda pair: pair[0])
    # A turn that is hardly better than none fits by chance.
    if not best[0] < tolerance or (best[1] is not None and best[0] > without / 2):
        raise UnsupportedModelError(
            f"the keys of layer {layer} do not move with position like rotary ones (closest: {best[0]:.1%} off); "
            "chunks of this model cannot be reused at another position"
        )
    return best[1]


def _column_choices(width: int, rows: Rows) -> list[RotaryColumns]:
    choices = []
    parts: tuple[Literal["k", "v"], ...] = ("k", "v")
    for part, interleaved in product(parts, (False, True)):
        dim = rows[0 if part == "k" else 1].shape[-1]
        if width <= dim:
            starts = sorted({0, dim - width})
            choices += [RotaryColumns(part, start, width, interleaved) for start in starts]
    return choices


def _same_rows(a: torch.Tensor, b: torch.Tensor, limit: float) -> torch.Tensor:
    """Mask of the tokens that have the same rows in both; all tokens when none has. The first token should be among
    them: at any position it sees only itself, so differences in the rounding of attention do not reach it."""
    same = (a.float() - b.float()).norm(dim=(0, 2)) < limit * b.float().norm(dim=(0, 2)).clamp(min=1e-30)
    return same if same.any() else torch.ones_like(same)


def _distance(ours: Rows, theirs: Rows, telling: torch.Tensor) -> float:
    """Relative difference of the two in the tokens of the mask ``telling``, the worse of K and V."""
    return max(
        float((a - b).norm() / b.norm().clamp(min=1e-30)) if b.numel() else 0.0
        for a, b in ((a[:, telling].float(), b[:, telling].float()) for a, b in zip(ours, theirs, strict=True))
    )


def turns_for(
    moves: Sequence[tuple[ChunkKV, int]], length: int, rotary: Sequence[LayerRotary | None]
) -> list[LayerTurn | None]:
    """For each layer, the turn that moves entries, one after the other, to the given positions of a prompt of
    ``length`` tokens."""
    old = [at for entry, _ in moves for at in range(entry.first_position, entry.first_position + len(entry.tokens))]
    new = [at for entry, position in moves for at in range(position, position + len(entry.tokens))]
    turns: dict[RotaryTable, CosSin] = {
        table: rotation_between(table.rows(old, length), table.rows(new, length))
        for table in dict.fromkeys(layer.table for layer in rotary if layer)
    }
    return [LayerTurn(layer.columns, turns[layer.table]) if layer else None for layer in rotary]
