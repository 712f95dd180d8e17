"""A blend pass whose set of tokens shrinks from layer to layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvmosaic.blend.base import Check
from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.engines.hf.attention import AttentionPlan
from kvmosaic.engines.hf.request_kv import RequestKV


def decoder_layers(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """The model's layers, first to last."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of its {count} layers; use another policy")


class Narrowing:
    """The rows that are still being computed. Those in the mask ``lasting`` ``[rows]`` are never dropped."""

    def __init__(self, checks: Sequence[Check], lasting: torch.Tensor, plan: AttentionPlan, kv: RequestKV) -> None:
        self._checks = {check.layer: check for check in checks}
        self._lasting = lasting
        self._plan = plan
        self._kv = kv
        self._where = plan.positions
        self._rows = torch.arange(len(lasting), device=lasting.device)
        self._survivors: torch.Tensor | None = None

    def written(self, layer: int, fresh: dict[str, torch.Tensor], reused: dict[str, torch.Tensor]) -> None:
        """Called with a layer's K and V ``[heads, rows, dim]``, new and old. A check decides which rows remain."""
        check = self._checks.get(layer)
        if check is None:
            return
        distance = (fresh[check.part].float() - reused[check.part].float()).square().sum((0, 2))
        distance[self._lasting[self._rows]] = torch.inf
        keep = int(self._lasting.sum()) + check.keep
        self._survivors = distance.topk(min(keep, len(distance))).indices.sort().values

    @contextmanager
    def active(self, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Drop rows between layers for the forward inside the block."""
        self._plan.is_plain_causal = False  # rows are about to be dropped
        self._kv.on_write = self.written
        handles = [layer.register_forward_pre_hook(self._enter, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            self._kv.on_write = None
            for handle in handles:
                handle.remove()

    def _enter(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, *rest = args
        if self._survivors is not None:
            hidden, self._rows, self._survivors = hidden[:, self._survivors], self._rows[self._survivors], None
            self._plan.positions = self._where[self._rows]
            self._kv.expect(self._plan.positions, self._plan.length)
        if len(self._rows) == len(self._where):
            return None
        return (hidden, *map(self._cut, rest)), {name: self._cut(value) for name, value in kwargs.items()}

    def _cut(self, value: Any) -> Any:
        """The surviving rows of a mask ``[1, 1, rows, keys]``, of positions ``[1, rows]`` or of their cos and sin."""
        if isinstance(value, tuple):
            return tuple(map(self._cut, value))
        if not isinstance(value, torch.Tensor):
            return value
        axis = 2 if value.ndim == 4 else 1
        fits = value.ndim > axis and value.shape[axis] == len(self._where)
        return value.index_select(axis, self._rows) if fits else value
