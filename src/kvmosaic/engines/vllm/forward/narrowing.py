"""Passes whose tokens become fewer from layer to layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvmosaic.engines.vllm.forward.decoder_layers import DecoderLayers
from kvmosaic.engines.vllm.forward.runs import Pass, remaining

Thin = Callable[[int, np.ndarray, torch.Tensor, torch.Tensor], np.ndarray | None]
"""Called with a layer's number, the tokens of the pass that it computes (their indices, ``[tokens]``), and their K
and V ``[tokens, kv_heads, dim]``. Returns those that the next layers compute, ``[tokens]`` bool; ``None`` for all."""


class SeenEnough(Exception):
    """A pass has computed the last layer that it needs."""


class Narrowing:
    """The tokens of a pass that are still being computed."""

    def __init__(self, work: Pass, layers: DecoderLayers, thin: Thin) -> None:
        self.work = work
        self.problem: str | None = None
        """Why the model cannot compute fewer tokens, if so. What it has computed is then wrong."""
        self._layers = layers
        self._thin = thin
        self._whole = self._before = work.num_tokens
        self._left = np.arange(work.num_tokens)
        """Indices of the tokens that are computed, among all tokens of the pass."""
        self._kept: np.ndarray | None = None
        """Which of the tokens that are computed the next layer is to compute, once that is chosen."""
        self._rows: dict[int, torch.Tensor] = {}
        """The remaining rows of a tensor, by its number of rows."""

    def computed(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """To be called with the K and V of each layer."""
        kept = self._thin(layer, self._left, k, v)
        self._kept = None if kept is None or kept.all() else kept

    @contextmanager
    def active(self, follow: Callable[[Pass], None]) -> Iterator[None]:
        """Drop tokens between the layers of the forward inside the block. ``follow`` is called with the pass of the
        tokens that are left, before they are computed."""

        def enter(
            layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if self._kept is not None:
                self._drop(self._kept)
                follow(self.work)
            return None if len(self._left) == self._whole else self._layers.changed(layer, args, kwargs, self._cut)

        with self._layers.entering(enter):
            yield

    def _drop(self, kept: np.ndarray) -> None:
        if not kept.any():
            raise SeenEnough
        before, self._kept, self._left = len(self._left), None, self._left[kept]
        self.work = Pass(remaining(self.work.runs, kept), self.work.block_sizes, self.work.device)
        # Tensors of the model's beginning have rows of all tokens; those of the last layer, of the tokens before.
        rows = {before: np.flatnonzero(kept), self._whole: self._left}
        self._rows = {count: torch.from_numpy(each).to(self.work.device) for count, each in rows.items()}

    def _cut(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        count = tensor.shape[axis]
        if count == len(self._left):
            return tensor
        if count not in self._rows:
            # Not an error: all ranks of a layer see it, and none of them waits for another one inside the model.
            self.problem = f"a layer gets {count} rows for {len(self._left)} tokens"
            raise SeenEnough
        return tensor.index_select(axis, self._rows[count])
