"""Access to entries for tests."""

import torch


def kv_of(entry):
    """K ``[heads, layers, tokens, k_dim]`` and V of an entry that keeps all tokens in all layers."""
    layers = [entry.layer(index) for index in range(entry.format.layers)]
    return tuple(torch.stack(parts, dim=1) for parts in zip(*layers, strict=True))
