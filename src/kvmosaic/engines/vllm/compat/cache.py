"""The shape of vLLM's KV cache."""

from dataclasses import fields, replace
from typing import Any

import torch
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.core.kv_cache_utils import is_kv_cache_spec_uniform, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpecKind,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from kvmosaic.engines.vllm.compat.layers import layer_index


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


def served_cache(vllm_config: Any, kv_cache_config: Any) -> Any:
    """The ``KVCacheConfig`` without the layers of a draft model, if these share a group with layers of another
    shape."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1 or not isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        return kv_cache_config
    every = groups[0].kv_cache_spec.kv_cache_specs
    names = [name for name in every if not _is_draft(vllm_config, name)]
    specs = [every[name] for name in names]
    if len(names) == len(every) or not is_kv_cache_spec_uniform({name: every[name] for name in names}):
        return kv_cache_config
    group = replace(groups[0], layer_names=names, kv_cache_spec=specs[0].merge(specs))
    return replace(kv_cache_config, kv_cache_groups=[group])


def _is_draft(vllm_config: Any, name: str) -> bool:
    """Whether a layer is one of a draft model. The scheduler's process has no model that could be asked; vLLM numbers
    the layers of drafts behind those of the model, or names them ``draft_model``."""
    if vllm_config.speculative_config is None:
        return False
    layers: int = vllm_config.model_config.hf_text_config.num_hidden_layers
    return name.startswith("draft_model.") or layer_index(name)[0] >= layers


def unsupported_cache(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Why the KV cache that vLLM is going to make cannot hold chunks."""
    groups = served_cache(vllm_config, kv_cache_config).kv_cache_groups
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return []
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
    of_model = [group for group in groups if not all(_is_draft(vllm_config, name) for name in group.layer_names)]
    if len(of_model) == 1 and isinstance(of_model[0].kv_cache_spec, FullAttentionSpec):
        draft = vllm_config.speculative_config.draft_model_config.model
        return [
            f"with the draft model {draft}, vLLM keeps KV in {len(groups)} groups of {kinds}; chunks need one group "
            "that keeps all tokens; use another draft model"
        ]
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
