"""Writing to the cache of vLLM's CPU backend before 0.26, which writes it only as a part of its own attention."""

from typing import Any

import torch


def write_on_cpu(module: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write K and V ``[tokens, heads, dim]`` of a layer at ``slots`` ``[tokens]``, as its attention would."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    blocks, heads, size, _ = module.kv_cache.shape
    k_cache, v_cache = module.kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
    dtype = module.impl.kv_cache_dtype
    ops.cpu_attn_reshape_and_cache(
        k,
        v,
        k_cache,
        v_cache,
        slots,
        _get_attn_isa(k.dtype, size, module.head_size, dtype),
        k_scale=module._k_scale_float,
        v_scale=module._v_scale_float,
        kv_cache_dtype=dtype,
    )
