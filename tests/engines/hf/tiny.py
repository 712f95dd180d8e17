"""Tiny random models of every architecture and rope variant the embedded engine must serve exactly."""

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCABULARY = 300
WINDOW = 16
LIMIT = 64
"""Length beyond which longrope and dynamic NTK tables change."""

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that attention is far from uniform
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def _rope(kind: str = "default", **extra):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=LIMIT)
_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=LIMIT
)
_LONGROPE = _rope(
    "longrope",
    original_max_position_embeddings=LIMIT,
    factor=8.0,
    short_factor=[1.0 + i / 10 for i in range(8)],
    long_factor=[2.0 + i / 10 for i in range(8)],
)
_TWO_ROPES = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    },
}

SUPPORTED = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig, _LLAMA3),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, _rope("linear", factor=4.0)),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, _YARN),
    "llama-dynamic": (
        LlamaForCausalLM,
        LlamaConfig,
        {**_rope("dynamic", factor=8.0), "max_position_embeddings": LIMIT},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 16, "sliding_window": WINDOW, **_TWO_ROPES}),
    "phi3-partial": (Phi3ForCausalLM, Phi3Config, _rope(partial_rotary_factor=0.5)),
    "phi3-longrope": (
        Phi3ForCausalLM,
        Phi3Config,
        {**_LONGROPE, "original_max_position_embeddings": LIMIT},
    ),
    "gpt-neox": (GPTNeoXForCausalLM, GPTNeoXConfig, _rope(partial_rotary_factor=0.25)),
    "deepseek-v2": (DeepseekV2ForCausalLM, DeepseekV2Config, {**_MLA, "topk_method": "greedy"}),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, _MLA),
    "deepseek-v3-yarn": (DeepseekV3ForCausalLM, DeepseekV3Config, {**_MLA, **_YARN}),
    "cohere": (CohereForCausalLM, CohereConfig, {}),
    "glm4": (Glm4ForCausalLM, Glm4Config, {"head_dim": 16}),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **_rope(),
        },
    ),
    # Windows that these models have in their masks only.
    "qwen2-moe-window": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 0,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "phimoe-window": (PhimoeForCausalLM, PhimoeConfig, {"sliding_window": WINDOW, "num_local_experts": 4}),
    "smollm3-nope": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
}

# Exact when recomputed. But its attention is cut at absolute positions, so a chunk that is moved to
# another place differs from the chunk computed there.
CHUNKED = {
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            "attention_chunk_size": WINDOW,
            "head_dim": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "attn_temperature_tuning": False,
        },
    )
}

UNSUPPORTED = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_positions": 512}),
    "bloom": (BloomForCausalLM, BloomConfig, {}),
    # Scales queries by positions it derives from the length of its cache.
    "llama4-tuned": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {**CHUNKED["llama4"][2], "attn_temperature_tuning": True, "floor_scale": 64},
    ),
    "mamba": (MambaForCausalLM, MambaConfig, {"state_size": 8}),
}


def make(name: str, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, different for every ``seed``."""
    model_class, config_class, extra = (SUPPORTED | CHUNKED | UNSUPPORTED)[name]
    torch.manual_seed(seed)
    return model_class(config_class(**{**_BASE, **extra})).eval()
