"""Tiny models with random weights, as folders that vLLM can load."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 512


def write_tiny_llama(folder: Path, kv_heads: int = 4, **changes) -> str:
    """Its heads split over two ranks."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **changes,
    )
    return _write(folder, LlamaForCausalLM(config))


def write_tiny_gemma(folder: Path, window: int) -> str:
    """Two layers of three have a sliding window."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        sliding_window=window,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _write(folder, Gemma3ForCausalLM(config))


def _write(folder: Path, model: PreTrainedModel) -> str:
    """With weights large enough that answers depend on what is attended to."""
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
