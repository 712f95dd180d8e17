"""The shape of vLLM's KV cache."""

from dataclasses import fields
from typing import Any

import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpecKind, SlidingWindowSpec, get_kv_cache_spec_kind


def keeping_all_tokens(specs: dict[str, Any]) -> dict[str, Any]:
    """Specs of layers, by name, in which those with a sliding window keep all tokens if others do, so that all layers
    are one group. vLLM does the same for connectors like ours, but in 0.26 such layers have the smallest
    blocks that their kernel takes, whatever ``block_size`` is, and then vLLM does not start."""
    whole = next((spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)), None)
    if whole is None:
        return specs
    return {name: _like(whole, spec) if type(spec) is SlidingWindowSpec else spec for name, spec in specs.items()}


def _like(whole: FullAttentionSpec, spec: Any) -> FullAttentionSpec:
    names = (each.name for each in fields(FullAttentionSpec) if each.init and hasattr(spec, each.name))
    return FullAttentionSpec(**{name: getattr(spec, name) for name in names} | {"block_size": whole.block_size})


def block_size(kv_cache_config: Any) -> int:
    """Tokens per block of the only group."""
    size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return size


def holds_bytes(kv_cache_config: Any) -> bool:
    """Whether each number of the KV cache has 8 bits, so that it is rounded."""
    dtype: torch.dtype = kv_cache_config.kv_cache_groups[0].kv_cache_spec.dtype
    return dtype.itemsize == 1


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per hash in ``request.block_hashes``."""
    size: int = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
    return size


def unsupported_cache(kv_cache_config: Any) -> list[str]:
    """Why the KV cache that vLLM is going to make cannot hold chunks."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return []
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
    return [
        f"this model keeps its KV in {len(groups)} group(s) of {kinds}; chunks need one group that keeps all tokens; "
        "use another model"
    ]


def unsupported_latent(vllm_config: Any) -> list[str]:
    """Why multi-head latent attention gives wrong answers in this vLLM. In 0.26 it takes contexts away from the last
    prompts of a step, unless prompts without a context are the last. The V2 runner orders prompts by length alone."""
    prefill = getattr(mla_attention, "MLACommonPrefillMetadata", None)
    context = getattr(prefill, "ChunkedContextMetadata", None)
    is_by_order = "prefill_tokens_with_context" in getattr(context, "__dataclass_fields__", {})
    if not (vllm_config.model_config.use_mla and is_by_order and getattr(vllm_config, "use_v2_model_runner", False)):
        return []
    return [
        "with multi-head latent attention, the V2 runner of this vLLM loses the context of some prompts; set "
        "VLLM_USE_V2_MODEL_RUNNER=0, or install a newer vLLM"
    ]


def sliding_window(kv_cache_config: Any) -> int | None:
    """Number of tokens that each token sees, including itself, in layers with a sliding window; ``None`` without such
    layers. All windows have the same size; otherwise vLLM refuses to keep all layers in one group."""
    window: int | None = kv_cache_config.kv_cache_groups[0].kv_cache_spec.sliding_window
    return window


def spec_kind(kv_cache_config: Any) -> str:
    """Name of the only group's layers in vLLM's events."""
    kind: str = get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[0].kv_cache_spec).value
    return kind


def windowed_kind() -> str:
    """Name of a group of layers with a sliding window in vLLM's events."""
    kind: str = KVCacheSpecKind.SLIDING_WINDOW.value
    return kind
