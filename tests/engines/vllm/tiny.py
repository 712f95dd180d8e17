"""Tiny models with random weights, as folders that vLLM can load."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 512
WINDOW = 60
"""Number of tokens that a token sees in layers with a sliding window."""
FP8_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}
"""Quantisation of a checkpoint whose weights are not quantised, but which asks for an fp8 KV cache."""


def write_tiny_llama(folder: Path, kv_heads: int = 4, **changes) -> str:
    """Write a tiny Llama whose heads can be split over two ranks."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return write_model(folder, LlamaForCausalLM(LlamaConfig(**shape | changes)))


def write_tiny_text(folder: Path, like: str | Path) -> str:
    """Write a tiny model with the tokenizer of the model in the folder ``like``, and eight layers, some of which
    policies can probe."""
    theirs = LlamaConfig.from_pretrained(like)
    tokens = {name: getattr(theirs, name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    model = write_tiny_llama(folder, num_hidden_layers=8, **tokens)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(like) / name, folder / name)
    return model


SIX_LAYERS: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of tiny models of six layers."""


def write_tiny_gemma(folder: Path, window: int) -> str:
    """Write a tiny Gemma, in which two of three layers have a sliding window."""
    config = Gemma3TextConfig(
        **SIX_LAYERS,
        head_dim=32,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    return write_model(folder, Gemma3ForCausalLM(config))


def write_tiny_deepseek(folder: Path, layers: int = 3) -> str:
    """Write a tiny model with multi-head latent attention, in sizes that vLLM's kernels for CPUs and GPUs support."""
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=8,
        first_k_dense_replace=layers,  # as many as there are layers: no experts
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        # Real checkpoints have yarn. With the default table, vLLM's kernel for CPUs is wrong (0.32).
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 512,
        },
    )
    return write_model(folder, DeepseekV2ForCausalLM(config))


def write_tiny_mixture(folder: Path) -> str:
    """Write a tiny model in which each token uses two of eight experts in every layer."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)  # writes each expert's weights under its own names, as real checkpoints have them
    return str(folder)


def write_tiny_eagle(folder: Path, target: str) -> str:
    """Write an EAGLE head of one layer for a Llama model, whose embeddings and hidden states it reads."""
    config = LlamaConfig.from_pretrained(target, num_hidden_layers=1)
    write_model(folder, LlamaForCausalLM(config))
    weights = load_file(folder / "model.safetensors")
    kept = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    kept["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.08
    save_file(kept, folder / "model.safetensors")
    return str(folder)


def write_tiny_eagle3(folder: Path, target: str) -> str:
    """Write an EAGLE-3 head for a Llama model. It reads the hidden states of three of the model's layers."""
    config = LlamaConfig.from_pretrained(target, num_hidden_layers=1)
    write_model(folder, LlamaForCausalLM(config))
    changes = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.vocab_size}
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))
    weights = load_file(folder / "model.safetensors")
    size, kept = config.hidden_size, {"lm_head.weight": weights["lm_head.weight"]}
    for name, tensor in weights.items():
        if name.startswith("model.layers.0."):
            kept[name.replace("model.layers.0.", "midlayer.")] = tensor
    for part in ("q_proj", "k_proj", "v_proj"):  # they also read the embedding of the next token
        name = f"midlayer.self_attn.{part}.weight"
        kept[name] = torch.randn(len(kept[name]), 2 * size) * 0.08
    kept |= {"midlayer.hidden_norm.weight": torch.ones(size), "norm.weight": torch.ones(size)}
    kept["fc.weight"] = torch.randn(size, 3 * size) * 0.08
    save_file(kept, folder / "model.safetensors")
    return str(folder)


def write_with_scales(folder: Path, like: str | Path) -> str:
    """Write the Llama model in the folder ``like`` with scales of an fp8 KV cache, different ones in each layer. No
    scale is a power of two, so that dividing by it rounds."""
    config = json.loads((Path(like) / "config.json").read_text())
    config["quantization_config"] = FP8_CACHE
    weights = load_file(Path(like) / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for part, scale in (("q", 0.06), ("k", 0.05), ("v", 0.03)):
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor([scale * (layer + 1)])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def write_model(folder: Path, model: PreTrainedModel) -> str:
    """Write a model, with weights large enough that answers depend on what is attended to."""
    torch.manual_seed(0)
    config = model.config
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.08)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    # Clones, because weights that are tied must not share memory in a file.
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return str(folder)
