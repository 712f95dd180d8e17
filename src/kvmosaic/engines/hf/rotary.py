"""Finds out, by asking the model, which cached columns rotate, how, and by which table.

Model classes differ in where they keep rotary tables, in how they pair columns, and in what they cache
(MLA caches a latent and rotates only its last columns). Instead of knowing each by name we compute the
same tokens at two positions and look for the turn that explains the difference, layer by layer. A model
whose keys move in any other way (learned or absolute positions, FoPE, dual-chunk) is found out here.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import xxhash

from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.core.rotation import CosSin, RotaryColumns, rotate_, rotation_between


@dataclass(frozen=True)
class RotaryTable:
    """One rotary table of the model: a rotary module, and the layer type it is asked for if it has several."""

    module: torch.nn.Module
    layer_type: str | None
    dtype: torch.dtype

    def rows(self, positions: Sequence[int], sequence_length: int) -> CosSin:
        """Table rows at ``positions`` as the model makes them for a prompt of ``sequence_length`` tokens."""
        self.reset()
        device = next(self.module.buffers()).device
        # Two more rows: some tables depend on the largest position asked for, so the sequence's last is
        # among them; and row 1 shows, where row 0 would not, whether values are repeated.
        ids = torch.tensor([[*positions, 1, sequence_length - 1]], device=device)
        kwargs = {} if self.layer_type is None else {"layer_type": self.layer_type}
        table = self.module(torch.zeros(1, dtype=self.dtype, device=device), ids, **kwargs)
        if torch.is_tensor(table):  # complex numbers, one per pair
            return CosSin(table.real[0, :-2].float(), table.imag[0, :-2].float())
        cos, sin = (part[0].float() for part in table)
        per_pair = _one_per_pair(sin)
        return CosSin(cos[:-2, per_pair], sin[:-2, per_pair])

    @property
    def may_switch(self) -> bool:
        """Whether the table depends on the sequence's length at all; spares the others a look each step."""
        kind = getattr(self.module, "rope_type", "default")
        return "longrope" in (kind if isinstance(kind, str) else kind.values())

    def reset(self) -> None:
        """Forget longer sequences seen before: tables that grow must not depend on history."""
        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        if hasattr(self.module, f"{prefix}original_inv_freq") and hasattr(self.module, "original_max_seq_len"):
            original = getattr(self.module, f"{prefix}original_inv_freq")
            setattr(self.module, f"{prefix}inv_freq", original.clone())
            setattr(self.module, f"{prefix}max_seq_len_cached", self.module.original_max_seq_len)


def _one_per_pair(table: torch.Tensor) -> slice:
    """The columns to take from a table that may hold each value once for either column of its pair."""
    half = table.shape[-1] // 2
    if table.shape[-1] % 2 == 0 and torch.equal(table[:, :half], table[:, half:]):
        return slice(0, half)
    if table.shape[-1] % 2 == 0 and torch.equal(table[:, 0::2], table[:, 1::2]):
        return slice(0, None, 2)
    return slice(None)


def regime_of(tables: Sequence[RotaryTable], length: int) -> str | None:
    """Name of the rotary tables in force for a prompt of ``length`` tokens: longrope has two sets, most
    models one. ``None`` where every length has its own (dynamic NTK past its limit): an entry made for
    one prompt would be wrong in any other."""
    before, now, after = (
        b"".join(part.cpu().numpy().tobytes() for table in tables for part in table.rows([1], at_length))
        for at_length in (length - 1, length, length + 1)
    )
    return xxhash.xxh3_64_hexdigest(now) if now in (before, after) else None


def rope_switches(tables: Sequence[RotaryTable], length: int) -> bool:
    """Whether a sequence growing to ``length`` tokens moves from one lasting set of tables to another."""
    if not any(table.may_switch for table in tables):
        return False
    before, now = regime_of(tables, length - 1), regime_of(tables, length)
    return None not in (before, now) and before != now


def find_tables(model: torch.nn.Module, dtype: torch.dtype) -> list[RotaryTable]:
    """All rotary tables of the model."""
    tables = []
    for module in model.modules():
        if not type(module).__name__.endswith("RotaryEmbedding") or not list(module.buffers()):
            continue
        if "layer_type" in inspect.signature(module.forward).parameters:
            kinds = [kind for kind in vars(module)["layer_types"] if hasattr(module, f"{kind}_inv_freq")]
            tables += [RotaryTable(module, kind, dtype) for kind in kinds]
        else:
            tables.append(RotaryTable(module, None, dtype))
    return tables


@dataclass(frozen=True)
class LayerRotary:
    """How one layer's cached rows depend on position."""

    table: RotaryTable
    columns: RotaryColumns


Rows = tuple[torch.Tensor, torch.Tensor]
"""K ``[heads, tokens, k_dim]`` and V ``[heads, tokens, v_dim]`` of one layer."""


def explain_layer(
    layer: int, at_old: Rows, at_new: Rows, old: range, new: range, tables: Sequence[RotaryTable]
) -> LayerRotary | None:
    """What turns the rows computed at ``old`` into those at ``new``; ``None`` when nothing has to turn."""
    length = max(old.stop, new.stop)
    best: tuple[float, LayerRotary | None] = (_distance(at_old, at_new), None)
    for table in tables:
        turn = rotation_between(table.rows(old, length), table.rows(new, length))
        for columns in _column_choices(2 * turn.cos.shape[-1], at_old):
            moved = (at_old[0].clone(), at_old[1].clone())
            rotate_(moved[0 if columns.part == "k" else 1], turn, columns)
            best = min(best, (_distance(moved, at_new), LayerRotary(table, columns)), key=lambda pair: pair[0])
    # Rounding alone separates right from seen; a wrong pairing is off by tens of percent.
    tolerance = 1e-3 if at_old[0].dtype == torch.float32 else 5e-2
    if not best[0] < tolerance:
        raise UnsupportedModelError(
            f"the keys of layer {layer} do not move with position like rotary ones (closest: {best[0]:.1%} off); "
            "chunks of this model cannot be reused at another position"
        )
    return best[1]


def _column_choices(width: int, rows: Rows) -> list[RotaryColumns]:
    choices = []
    for part, interleaved in product(("k", "v"), (False, True)):
        dim = rows[0 if part == "k" else 1].shape[-1]
        if width <= dim:
            starts = sorted({0, dim - width})
            choices += [RotaryColumns(part, start, width, interleaved) for start in starts]
    return choices


def _distance(ours: Rows, theirs: Rows) -> float:
    """Relative difference of the two, the worse of K and V."""
    return max(
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) if b.numel() else 0.0
        for a, b in zip(ours, theirs, strict=True)
    )
