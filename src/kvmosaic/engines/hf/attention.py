"""Attention of any subset of a prompt's tokens, exact in position.

Registered with transformers as one more attention implementation. While a plan is active every layer's
queries see exactly the keys at or before their own position (and inside the layer's sliding window),
whatever gaps lie between them; the arithmetic stays that of the model's own implementation.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvmosaic.core.errors import UnsupportedModelError

IMPLEMENTATION = "kvmosaic"


class AttentionPlan:
    """Positions of the query rows of one forward, over keys at positions ``0 .. length-1``."""

    def __init__(self, positions: torch.Tensor, length: int) -> None:
        self.positions = positions
        self.length = length
        self.calls = 0
        """How many layers came through here: a model that bypasses us must not be trusted."""
        self._masks: dict[int | None, torch.Tensor] = {}
        rows = len(positions)
        self._is_plain_causal = rows == length or (rows == 1 and int(positions[0]) == length - 1)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """``[1, 1, rows, length]`` bool, or ``None`` where ordinary causal attention does the same."""
        if self._is_plain_causal and (window is None or window >= self.length):
            return None
        return self.dense_mask(window)

    def dense_mask(self, window: int | None) -> torch.Tensor:
        if window not in self._masks:
            keys = torch.arange(self.length, device=self.positions.device)
            mask = keys[None, :] <= self.positions[:, None]
            if window is not None:
                mask &= keys[None, :] > self.positions[:, None] - window
            self._masks[window] = mask[None, None]
        return self._masks[window]


_plan: AttentionPlan | None = None
_native = "sdpa"


def _positional_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert _plan is not None
    assert attention_mask is None
    assert (query.shape[2], key.shape[2]) == (len(_plan.positions), _plan.length)
    _plan.calls += 1
    if _native != "eager":
        return sdpa_attention_forward(module, query, key, value, _plan.mask(sliding_window), **kwargs)
    # Models with attention quirks (soft caps, learned sinks) define their own eager function.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no replaceable attention; use the model without cache"
        )
    additive = torch.zeros_like(_plan.dense_mask(sliding_window), dtype=query.dtype)
    additive.masked_fill_(~_plan.dense_mask(sliding_window), torch.finfo(query.dtype).min)
    return eager(module, query, key, value, additive, sliding_window=sliding_window, **kwargs)


AttentionInterface.register(IMPLEMENTATION, _positional_attention)


@contextmanager
def positional_attention(model: PreTrainedModel) -> Iterator[None]:
    """Route the model's attention through plans; on exit the model is as it was."""
    global _native
    before = model.config.get_text_config()._attn_implementation
    if before == IMPLEMENTATION:  # already routed: a fill in the middle of a request
        yield
        return
    _native = "eager" if before == "eager" else "sdpa"
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def active_plan(plan: AttentionPlan) -> Iterator[None]:
    """Use ``plan`` for the forward inside the block."""
    global _plan
    _plan = plan
    try:
        yield
    finally:
        _plan = None
