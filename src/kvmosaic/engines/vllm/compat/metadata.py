"""vLLM's attention metadata, which describes the sequences of a forward to backends."""

import copy
import inspect
from typing import Any

import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata as their_build_attn_metadata
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer, init_attn_backend

__all__ = ["build_attn_metadata", "build_slot_mappings_by_layer", "init_attn_backend", "with_sequences"]

SIZED_BY_BUILDERS = frozenset(
    {"AMX_MLA", "CPU_ATTN", "CPU_MLA", "FLASHINFER", "FLASHMLA", "FLASH_ATTN", "FLASH_ATTN_MLA", "TRITON_ATTN"}
)
"""Backends whose source was checked: in them, only metadata builders depend on the maximum number of sequences."""

TAKES_PREFILLING = "is_prefilling" in inspect.signature(their_build_attn_metadata).parameters
"""Whether vLLM's function takes ``is_prefilling``, unlike that of releases before 0.26; read once for all passes."""


def build_attn_metadata(*, is_prefilling: torch.Tensor, **arguments: Any) -> dict[str, Any]:
    """Metadata by layer, from vLLM's function of that name."""
    if TAKES_PREFILLING:
        arguments["is_prefilling"] = is_prefilling
    metadata: dict[str, Any] = their_build_attn_metadata(**arguments)
    return metadata


def with_sequences(vllm_config: Any, kv_cache_config: Any, count: int) -> Any:
    """The configuration with which metadata builders accept ``count`` sequences. It is unchanged if it already allows
    as many, or if a backend may have other buffers of that size."""
    layers = vllm_config.compilation_config.static_forward_context
    names = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    backends = {layers[name].get_attn_backend().get_name() for name in names}
    if vllm_config.scheduler_config.max_num_seqs >= count or not backends <= SIZED_BY_BUILDERS:
        return vllm_config
    config = copy.copy(vllm_config)
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.max_num_seqs = count
    return config
