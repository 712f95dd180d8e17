"""Random weights, drawn when vLLM loads the model, with which some tokens attract attention.

Policies choose the tokens that the question attends to, and the number of runs of chosen tokens decides the cost of a
blend. With purely random weights no token would stand out, and only the beginnings of chunks would ever be chosen.
"""

from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "kvmosaic-bench"
STANDING_OUT = 1.1
"""Standard deviation that the embedding's first column gives to keys; all other columns together give 1. With this
value, a policy's choice falls into about as many runs as in a real model (docs/benchmarks.md)."""


@register_model_loader(LOAD_FORMAT)
class RandomWeights(BaseModelLoader):
    """Weights with which layers add little to a token's embedding. The embedding's first column decides how much the
    token stands out: it makes the token's keys longer, and longer keys get more attention from all queries."""

    def download_model(self, model_config: object) -> None:
        """There is nothing to fetch."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        torch.manual_seed(0)
        shape: Any = model.config
        queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 1:
                    weight.fill_(1)  # weight of a norm
                elif "embed_tokens" in name:
                    weight.normal_()
                else:
                    adds_up = "o_proj" in name or "down_proj" in name
                    weight.normal_(std=weight.shape[1] ** -0.5 / (shape.num_hidden_layers if adds_up else 1))
                if "qkv_proj" in name:
                    weight[queries : queries + keys, 0].normal_(std=STANDING_OUT)
