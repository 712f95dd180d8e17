"""How much queries attend to reused tokens."""

import torch


def attention_weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax of ``q`` ``[heads, queries, dim]`` over all of ``k`` ``[kv_heads, tokens, dim]``, summed over heads, in
    fp32: ``[queries, tokens]``."""
    heads, queries, dim = q.shape
    grouped = q.float().reshape(k.shape[0], -1, dim)  # query heads that share a KV head are neighbours
    total = torch.zeros(queries, k.shape[1], device=q.device)
    for head, rows in enumerate(grouped):  # one KV head at a time: the weights are large
        weights = torch.softmax(rows @ k[head].float().T * scale, dim=-1)
        total += weights.view(-1, queries, k.shape[1]).sum(0)
    assert heads % k.shape[0] == 0
    return total
