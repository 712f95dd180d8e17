"""Random weights, drawn when vLLM loads the model, such that attention has something to look at.

Policies choose what the question looks at, and how many runs that makes decides what a blend costs. With plainly
random weights no token stands out, and only the beginnings of chunks would ever be chosen.
"""

from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "kvmosaic-bench"
STANDING_OUT = 1.1
"""Of a key, for the first column of the embedding, where all others together give 1. So a policy's choice falls into
about as many runs as in a real model (docs/benchmarks.md)."""


@register_model_loader(LOAD_FORMAT)
class RandomWeights(BaseModelLoader):
    """Layers add little to a token's embedding, whose first column says how much the token stands out: its keys are
    the longer for it, and longer keys get more of everybody's attention."""

    def download_model(self, model_config: object) -> None:
        """There is nothing to fetch."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        torch.manual_seed(0)
        shape: Any = model.config
        queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.fill_(1)  # of a norm
                elif "embed_tokens" in name:
                    weight.normal_()
                else:
                    adds_up = "o_proj" in name or "down_proj" in name
                    weight.normal_(std=weight.shape[1] ** -0.5 / (shape.num_hidden_layers if adds_up else 1))
                if "qkv_proj" in name:
                    weight[queries : queries + keys, 0].normal_(std=STANDING_OUT)
