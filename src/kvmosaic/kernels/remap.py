"""Copies an entry to its position in a request: changes the layout and turns the rotary columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.rotation import CosSin, RotaryColumns, rotate_


@dataclass(frozen=True)
class LayerTurn:
    """How the keys of one layer turn. In a list, ``None`` stands for a layer whose keys do not turn."""

    columns: RotaryColumns
    turn: CosSin


def remap(
    entry: ChunkKV,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    position: int,
    turns: Sequence[LayerTurn | None],
) -> None:
    """Write ``entry`` into ``k_out`` ``[layers, heads, capacity, k_dim]`` and ``v_out``
    ``[layers, heads, capacity, v_dim]``, from ``position`` on. ``turns`` has one item per layer."""
    end, own = position + len(entry.tokens), entry.format
    sizes = own.layers, own.heads, own.k_dim, own.heads, own.v_dim, own.dtype
    if sizes != (len(turns), k_out.shape[1], k_out.shape[3], v_out.shape[1], v_out.shape[3], k_out.dtype):
        raise ValueError(f"an entry of {own} cannot be placed in a cache of {tuple(k_out.shape)} {k_out.dtype}")
    assert len(turns) == k_out.shape[0]
    assert 0 <= position < end <= k_out.shape[2]
    assert not own.tails.cuts(len(entry.tokens))
    # Layer by layer, so that a CPU turns the copied rows while they are still in its cache.
    for layer, layer_turn in enumerate(turns):
        rows = {"k": k_out[layer, :, position:end], "v": v_out[layer, :, position:end]}
        k, v = entry.layer(layer)
        rows["k"].copy_(k)
        rows["v"].copy_(v)
        if layer_turn is not None:
            rotate_(rows[layer_turn.columns.part], layer_turn.turn, layer_turn.columns)
