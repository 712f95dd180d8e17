"""vllm-ascend, vLLM's plugin for Ascend NPUs: metadata of a pass for its backends.

Prepared from the source of its release 0.23.0.post1, which is for vLLM 0.23; never run on an NPU. The plugin is
imported only inside functions, because it can be imported only where CANN, the NPU's runtime, is installed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.config import set_current_vllm_config

PLUGIN = "vllm_ascend"
"""Name of the plugin's package."""
RELIES_ON: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm/v1/attention/backend.py": {
        "CommonAttentionMetadata": (
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "block_table_tensor",
            "slot_mapping",
            "seq_lens_cpu_upper_bound",
            "is_prefilling",
        ),
    },
    "vllm_ascend/attention/utils.py": {
        "AscendCommonAttentionMetadata": (
            "seq_lens_cpu",
            "num_computed_tokens_cpu",
            "positions",
            "attn_state",
            "num_input_tokens",
        ),
    },
    "vllm_ascend/attention/attention_v1.py": {
        "AscendAttentionState": ("ChunkedPrefill",),
        "AscendAttentionBackend": ("get_builder_cls", "get_impl_cls"),
        "AscendAttentionMetadataBuilder.__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        "AscendAttentionMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata"),
        "AscendAttentionBackendImpl.do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
        "AscendAttentionBackendImpl.forward": (
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
        ),
    },
    "vllm_ascend/ascend_forward_context.py": {
        "set_ascend_forward_context": (
            "attn_metadata",
            "vllm_config",
            "num_tokens",
            "num_actual_tokens",
            "model_instance",
            "skip_compiled",
        ),
    },
    "vllm_ascend/worker/worker.py": {
        "NPUWorker": ("load_model", "execute_model", "initialize_from_config"),
        "NPUWorker.execute_model": ("scheduler_output",),
    },
}
"""Everything of the plugin that we use, by file: parameters of functions; fields and methods of classes."""


def is_ascend(backend: Any) -> bool:
    """Whether an attention backend is one of the plugin's."""
    return str(backend.__module__).partition(".")[0] == PLUGIN


def metadata_builders(
    vllm_config: Any, kv_cache_config: Any, device: torch.device
) -> list[tuple[Any, Sequence[str]]]:
    """New metadata builders for the only KV cache group, and the names of each one's layers."""
    [group] = kv_cache_config.kv_cache_groups
    layers = vllm_config.compilation_config.static_forward_context
    names_of: dict[Any, list[str]] = {}
    for name in group.layer_names:
        names_of.setdefault(layers[name].get_attn_backend(), []).append(name)
    with set_current_vllm_config(vllm_config):  # backends ask it which builder to use
        return [
            (backend.get_builder_cls()(group.kv_cache_spec, names, vllm_config, device), names)
            for backend, names in names_of.items()
        ]


def sequences_metadata(
    offsets: torch.Tensor, ends: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
) -> Any:
    """The input from which the plugin's builders build metadata. ``offsets`` ``[sequences + 1]`` and ``ends``
    ``[sequences]`` are int32 on the host: where each sequence begins among the tokens, and its length. The rest is on
    the NPU: ``block_table`` ``[sequences, blocks]`` int32, ``slots`` and ``positions`` ``[tokens]``."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionState
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

    lengths = offsets.diff()
    return AscendCommonAttentionMetadata(
        query_start_loc=offsets.to(slots.device),
        query_start_loc_cpu=offsets,
        seq_lens=ends.to(slots.device),
        seq_lens_cpu=ends,
        seq_lens_cpu_upper_bound=ends,
        num_computed_tokens_cpu=ends - lengths,
        num_reqs=len(ends),
        num_actual_tokens=len(positions),
        num_input_tokens=len(positions),
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=block_table,
        slot_mapping=slots.to(torch.int32),  # the NPU's kernel takes no other type
        is_prefilling=torch.ones(len(ends), dtype=torch.bool),
        positions=positions,
        # The state in which every sequence reads the cache by its row of the block table, whatever its length. In
        # others, K and V are taken from the step alone, or each sequence has one token.
        attn_state=AscendAttentionState.ChunkedPrefill,
    )


def forward_context(
    metadata: dict[str, Any], vllm_config: Any, model: Any, num_tokens: int
) -> AbstractContextManager[None]:
    """The surroundings of a forward of ``num_tokens``, without compiled code and without graphs. Rotary modules of
    the models that we accept take their positions as an argument, and need nothing else."""
    from vllm_ascend.ascend_forward_context import set_ascend_forward_context

    context: AbstractContextManager[None] = set_ascend_forward_context(
        metadata,
        vllm_config,
        num_tokens=num_tokens,
        num_actual_tokens=num_tokens,
        model_instance=model,
        skip_compiled=True,
    )
    return context
