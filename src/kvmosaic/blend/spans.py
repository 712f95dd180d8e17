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
    runs = -(-assembled.lengths // width)
    run_of = np.repeat(runs.cumsum() - runs, assembled.lengths) + assembled.places // width
    mean = np.bincount(run_of, weights=scores.double().cpu().numpy()) / np.bincount(run_of)
    chosen = np.zeros(len(run_of), dtype=bool) if given is None else given.numpy().copy()
    chosen[np.flatnonzero(chosen)[count:]] = False
    room = count - int(chosen.sum())
    # Runs from best to worst as long as there is room, then the first tokens of the next; ties go to the earlier run.
    best = np.argsort(-mean, kind="stable")
    taken = np.bincount(run_of, weights=~chosen)[best].cumsum()
    whole = int(np.searchsorted(taken, room, side="right"))
    is_whole = np.zeros(len(mean), dtype=bool)
    is_whole[best[:whole]] = True
    if whole < len(best):
        rest = np.flatnonzero((run_of == best[whole]) & ~chosen)
        chosen[rest[: room - int(taken[whole - 1] if whole else 0)]] = True
    return torch.from_numpy(chosen | is_whole[run_of])
