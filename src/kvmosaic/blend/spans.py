"""Choosing runs of neighbouring tokens: each run is one attention sequence, and a lone token computed between
neighbours that were computed without any context can do harm."""

import torch

from kvmosaic.blend.base import AssembledPrompt


def best_spans(
    scores: torch.Tensor, assembled: AssembledPrompt, count: int, width: int, given: torch.Tensor | None = None
) -> torch.Tensor:
    """``[chunk tokens]`` bool: ``count`` tokens, those ``given`` (``[chunk tokens]`` bool) among them, the others in
    runs of ``width`` that do not cross chunks (shorter at a chunk's end), by the mean of their ``scores`` ``[chunk
    tokens]``."""
    owner, begin = [], 0
    for span in assembled.prompt.chunks:
        owner.append(begin + torch.arange(len(span)) // width)
        begin = int(owner[-1][-1]) + 1
    run_of = torch.cat(owner)
    total = torch.zeros(begin).index_add_(0, run_of, scores.float().cpu())
    mean = total / torch.bincount(run_of, minlength=begin)
    # Runs from best to worst, each one's tokens in order; ties go to the earlier run.
    rank = torch.empty(begin, dtype=torch.long)
    rank[torch.argsort(mean, descending=True, stable=True)] = torch.arange(begin)
    rank_of = rank[run_of] if given is None else torch.where(given, -1, rank[run_of])
    order = torch.argsort(rank_of, stable=True)[:count]
    chosen = torch.zeros(len(run_of), dtype=torch.bool)
    chosen[order] = True
    return chosen
