"""The rotary tables of a transformers model, and how they depend on the prompt's length."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from kvmosaic.core.rotation import CosSin


@dataclass(frozen=True)
class TransformersTable:
    """One rotary table of the model: a rotary module, and the layer type it is asked for if it has several."""

    module: torch.nn.Module
    layer_type: str | None
    dtype: torch.dtype

    def rows(self, positions: Sequence[int], sequence_length: int) -> CosSin:
        """Table rows at ``positions`` as the model makes them for a prompt of ``sequence_length`` tokens."""
        self.reset()
        device = next(self.module.buffers()).device
        # Two more rows. Some tables depend on the largest requested position, so the sequence's last one is included.
        # Row 1 shows whether values are repeated; row 0 would not.
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
        """Whether the table has two fixed sets of values (longrope). Other tables need no check at each step."""
        kind = getattr(self.module, "rope_type", "default")
        return "longrope" in (kind if isinstance(kind, str) else kind.values())

    def reset(self) -> None:
        """Forget longer sequences seen before: tables that grow must not depend on history."""
        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        if hasattr(self.module, f"{prefix}original_inv_freq") and hasattr(self.module, "original_max_seq_len"):
            original = getattr(self.module, f"{prefix}original_inv_freq")
            with torch.inference_mode(False):  # the model writes to it, maybe while gradients are computed
                setattr(self.module, f"{prefix}inv_freq", original.clone())
            setattr(self.module, f"{prefix}max_seq_len_cached", self.module.original_max_seq_len)


def _one_per_pair(table: torch.Tensor) -> slice:
    """The columns with one value per pair, of a table that may hold each value for both columns of its pair."""
    half = table.shape[-1] // 2
    if table.shape[-1] % 2 == 0 and torch.equal(table[:, :half], table[:, half:]):
        return slice(0, half)
    if table.shape[-1] % 2 == 0 and torch.equal(table[:, 0::2], table[:, 1::2]):
        return slice(0, None, 2)
    return slice(None)


def regime_of(tables: Sequence[TransformersTable], length: int) -> str | None:
    """Name of the rotary tables that are used for a prompt of ``length`` tokens: longrope has two sets, most models
    one. ``None`` if every length has its own table (dynamic NTK beyond its limit): an entry made for one prompt would
    be wrong in any other."""
    before, now, after = (
        b"".join(part.cpu().numpy().tobytes() for table in tables for part in table.rows([1], at_length))
        for at_length in (length - 1, length, length + 1)
    )
    return xxhash.xxh3_64_hexdigest(now) if now in (before, after) else None


def rope_switches(tables: Sequence[TransformersTable], length: int) -> bool:
    """Whether a sequence growing to ``length`` tokens switches from one fixed set of tables to another."""
    if not any(table.may_switch for table in tables):
        return False
    before, now = regime_of(tables, length - 1), regime_of(tables, length)
    return None not in (before, now) and before != now


def find_tables(model: torch.nn.Module, dtype: torch.dtype) -> list[TransformersTable]:
    """All rotary tables of the model."""
    tables = []
    for module in model.modules():
        if not type(module).__name__.endswith("RotaryEmbedding") or not list(module.buffers()):
            continue
        if "layer_type" in inspect.signature(module.forward).parameters:
            kinds = [kind for kind in vars(module)["layer_types"] if hasattr(module, f"{kind}_inv_freq")]
            tables += [TransformersTable(module, kind, dtype) for kind in kinds]
        else:
            tables.append(TransformersTable(module, None, dtype))
    return tables
