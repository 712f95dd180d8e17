"""How much queries attend to reused tokens."""

import torch

MOST_WEIGHTS = 2**25
"""Maximum number of weights that are computed at a time, but at least those of one KV head."""


def attention_weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax of ``q`` ``[heads, queries, dim]`` over all of ``k`` ``[kv_heads, tokens, dim]``, summed over heads, in
    fp32: ``[queries, tokens]``."""
    heads, queries, dim = q.shape
    assert heads % k.shape[0] == 0
    grouped = q.float().reshape(k.shape[0], -1, dim)  # query heads that share a KV head are neighbours
    total = torch.zeros(queries, k.shape[1], device=q.device)
    at_a_time = max(1, MOST_WEIGHTS // (grouped.shape[1] * k.shape[1]))
    for rows, keys in zip(grouped.split(at_a_time), k.split(at_a_time), strict=True):
        weights = torch.softmax(rows @ keys.float().transpose(1, 2) * scale, dim=-1)
        total += weights.view(-1, queries, k.shape[1]).sum(0)
    return total
