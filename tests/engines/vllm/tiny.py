"""A tiny model with random weights whose heads split over two ranks, as a folder vLLM can load."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM


def write_tiny_llama(folder: Path, kv_heads: int = 4, **changes) -> str:
    """Weights large enough that answers depend on what is attended to."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
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
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.08)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )
    return str(folder)
