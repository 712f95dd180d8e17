"""vLLM's attention layers: their caches, their backends, and how to replace a backend's attention."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import Attention


def attention_layers(vllm_config: Any, kv_cache_config: Any) -> list[Any]:
    """The attention layers that have a cache, first to last."""
    context = vllm_config.compilation_config.static_forward_context
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return [context[name] for name in sorted(names, key=_layer_index)]


def _layer_index(name: str) -> tuple[int, str]:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return (numbers[0] if numbers else 0, name)


def has_shared_caches(vllm_config: Any) -> bool:
    """Whether some layers read another layer's cache and have none of their own."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return any(getattr(layer, "kv_sharing_target_layer_name", None) is not None for layer in layers)


def paged_cache(layer: Any) -> torch.Tensor:
    """The paged KV cache of an attention layer; on most backends ``[blocks, heads, block_size, k_dim + v_dim]``."""
    return layer.kv_cache


def softmax_scale(layer: Any) -> float:
    """Scaling factor of a layer's attention scores."""
    scale: float = layer.impl.scale
    return scale


def window_of(layer: Any) -> int | None:
    """Number of tokens that each token sees in a layer, including itself; ``None``: all before it."""
    window: int | None = getattr(layer, "sliding_window", None)
    return window


def write_kv(layer: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store K and V ``[tokens, heads, dim]`` of one layer at ``slots`` ``[tokens]``. The backend chooses the memory
    order."""
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)


def attend_by_backend(
    layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any, out: torch.Tensor
) -> None:
    """Attention of ``q`` ``[tokens, heads, dim]`` over a layer's cache by its backend, into ``out``."""
    layer.impl.forward(layer, q, k, v, layer.kv_cache, metadata, output=out)


Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Callable[[], object]], None]
"""Computes a layer's attention. Its arguments are the layer, queries ``[tokens, heads, dim]``, K and V ``[tokens,
kv_heads, dim]``, the output ``[tokens, heads, v_dim]``, and a function that runs the backend's own attention."""


class _Attention:
    """Stands in for a layer's backend: ``attend`` computes attention, the backend does everything else."""

    def __init__(self, backend: Any, attend: Attend, before: Callable[[Any], None]) -> None:
        self._backend = backend
        self._attend = attend
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def do_kv_cache_update(self, layer: Any, *given: Any) -> None:
        self._before(layer)
        self._backend.do_kv_cache_update(layer, *given)

    def forward(
        self,
        layer: Any,
        q: torch.Tensor,
        k: Any,
        v: Any,
        cache: Any,
        metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> torch.Tensor:
        def theirs() -> object:
            return self._backend.forward(layer, q, k, v, cache, metadata, output=output, **scales)

        self._attend(layer, q, k, v, output, theirs)
        return output


@contextmanager
def attention_by(attend: Attend, before: Callable[[Any], None], layers: Sequence[Any]) -> Iterator[None]:
    """Have ``attend`` compute the attention of ``layers``, and call ``before`` with each layer before its K and V are
    written. Compiled code also uses them, because it looks up ``impl`` when it runs."""
    backends = [layer.impl for layer in layers]
    # Set as a plain attribute: a module's own ``__setattr__`` looks for parameters first, which is slower.
    for layer, backend in zip(layers, backends, strict=True):
        object.__setattr__(layer, "impl", _Attention(backend, attend, before))
    try:
        yield
    finally:
        for layer, backend in zip(layers, backends, strict=True):
            object.__setattr__(layer, "impl", backend)


def is_plain_attention(layer: Any) -> bool:
    """Whether a layer's attention is only a softmax of scaled products, possibly within a window, and K and V are
    written by a separate call before it."""
    impl = layer.impl
    return (
        type(layer) is Attention
        and not layer.attn_backend.forward_includes_kv_cache_update
        and getattr(impl, "alibi_slopes", None) is None
        and getattr(impl, "sinks", None) is None
        and not getattr(impl, "logits_soft_cap", None)
    )
