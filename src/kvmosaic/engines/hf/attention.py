"""Attention of any subset of a prompt's tokens, exact in position.

Registered with transformers as one more attention implementation. While a plan is active the model's own
mask rule (causal, sliding window, chunked, …) is evaluated at the true positions of the rows, which may have gaps
between them. The arithmetic is that of the model's own implementation.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvmosaic.core.errors import UnsupportedModelError

IMPLEMENTATION = "kvmosaic"

exclusive = threading.RLock()
"""Held while a model runs: the plan below and a model's attention implementation are shared state."""


Observer = Callable[[int, torch.Tensor, torch.Tensor, float], None]


class AttentionPlan:
    """Positions of the query rows of one forward, over keys at positions ``0 .. length-1``."""

    def __init__(self, positions: torch.Tensor, length: int) -> None:
        """``positions`` are ``[rows]``, the same in each sequence of a batch, or ``[batch, rows]``."""
        self.positions = positions
        self.length = length
        self.calls = 0
        """Number of layers that used this plan. A model that bypasses it must not be trusted."""
        self.observe: Observer | None = None
        """Called in each layer with its index, queries ``[heads, rows, dim]``, keys ``[kv_heads, length, dim]`` and
        the scale of their products, before attention is computed."""
        rows = positions.shape[-1]
        self.is_plain_causal = positions.dim() == 1 and (
            rows == length or (rows == 1 and int(positions[0]) == length - 1)
        )
        """Whether ordinary causal attention, without a mask, gives the same result."""

    def visible(self, rule: Callable[..., torch.Tensor]) -> torch.Tensor:
        """``[1 or batch, rows, length]`` bool: a transformers mask rule, evaluated at the rows' true positions."""
        keys = torch.arange(self.length, device=self.positions.device)
        zero = torch.zeros(1, 1, 1, dtype=torch.long, device=self.positions.device)
        rows = self.positions.view(-1, self.positions.shape[-1], 1)
        return rule(zero, zero, rows, keys.view(1, 1, -1))


_plan: AttentionPlan | None = None
_native = "sdpa"


def _positional_mask(
    *args: Any,
    mask_function: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """``[1 or batch, 1, rows, length]``, or ``None`` if ordinary causal attention gives the same result."""
    assert _plan is not None
    reaches_all = local_size is None or local_size >= _plan.length
    if _plan.is_plain_causal and reaches_all and allow_is_causal_skip and _native != "eager":
        return None
    mask = _plan.visible(mask_function)[:, None]
    if _native != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _positional_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert _plan is not None
    assert (query.shape[2], key.shape[2]) == (_plan.positions.shape[-1], _plan.length)
    _plan.calls += 1
    if _plan.observe is not None:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        _plan.observe(int(module.layer_idx), query[0], key[0], scale)  # type: ignore[arg-type]
    if attention_mask is None and not _plan.is_plain_causal:
        raise UnsupportedModelError(f"{type(module).__name__} does not take the attention mask it is given")
    if _native != "eager":
        rows = query.shape[2]
        if not query.is_cuda or attention_mask is None or rows % 32 != 1 or rows == 1:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        # On CUDA, with a mask and a head size of 256, the row after a multiple of 32 is wrong if it is the last one.
        # This was seen with torch 2.11 in every such call (pytorch issue 191937 is similar). So one row is added.
        query, attention_mask = (torch.cat([x, x[:, :, -1:]], dim=2) for x in (query, attention_mask))
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output[:, :rows], weights
    # Models with attention quirks (soft caps, learned sinks) define their own eager function.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no attention function that can be called with a mask"
        )
    return eager(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(IMPLEMENTATION, _positional_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _positional_mask)


@contextmanager
def positional_attention(model: PreTrainedModel) -> Iterator[None]:
    """Route the model's attention through plans; on exit the model is as it was."""
    global _native
    with exclusive:
        config = model.config.get_text_config()
        before = config._attn_implementation
        if before == IMPLEMENTATION:  # already routed: a fill in the middle of a request
            yield
            return
        _native = "eager" if before == "eager" else "sdpa"
        config._attn_implementation = IMPLEMENTATION
        try:
            yield
        finally:
            config._attn_implementation = before


@contextmanager
def active_plan(plan: AttentionPlan) -> Iterator[None]:
    """Use ``plan`` for the forward inside the block."""
    global _plan
    _plan = plan
    try:
        yield
    finally:
        _plan = None
