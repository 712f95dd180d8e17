"""Choosing runs of neighbouring tokens: each run is one attention sequence, and a lone token computed between
neighbours that were computed without any context can do harm."""

import numpy as np
import torch

from kvmosaic.blend.base import AssembledPrompt


def best_spans(
    scores: torch.Tensor, assembled: AssembledPrompt, count: int, width: int, given: torch.Tensor | None = None
) -> torch.Tensor:
    """``[chunk tokens]`` bool: ``count`` tokens, those ``given`` (``[chunk tokens]`` bool) among them, the others in
    runs of ``width`` that do not cross chunks (shorter at a chunk's end), by the mean of their ``scores`` ``[chunk
    tokens]``."""
    # In numpy: these are many small steps, for each of which torch would wake up its threads.
    lengths = np.array([len(span) for span in assembled.prompt.chunks])
    runs = -(-lengths // width)
    run_of = np.repeat(runs.cumsum() - runs, lengths) + places(assembled) // width
    mean = np.bincount(run_of, weights=scores.double().cpu().numpy()) / np.bincount(run_of)
    # Runs from best to worst, each one's tokens in order; ties go to the earlier run.
    rank = np.empty(len(mean), dtype=np.int64)
    rank[np.argsort(-mean, kind="stable")] = np.arange(len(mean))
    rank_of = rank[run_of] if given is None else np.where(given.numpy(), -1, rank[run_of])
    chosen = torch.zeros(len(run_of), dtype=torch.bool)
    chosen[torch.from_numpy(np.argsort(rank_of, kind="stable")[:count])] = True
    return chosen


def places(assembled: AssembledPrompt) -> np.ndarray:
    """Where each chunk token stands in its chunk, ``[chunk tokens]``."""
    spans = [np.arange(len(span)) for span in assembled.prompt.chunks]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)
