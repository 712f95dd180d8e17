"""Chooses runs of neighbouring tokens. Each run is one attention sequence. A single recomputed token can do harm if
its neighbours were computed without any context."""

import numpy as np
import torch

from kvmosaic.blend.base import AssembledPrompt


def best_spans(
    scores: torch.Tensor, assembled: AssembledPrompt, count: int, width: int, given: torch.Tensor | None = None
) -> torch.Tensor:
    """``[chunk tokens]`` bool: ``count`` tokens, including those ``given`` (``[chunk tokens]`` bool). The others are
    in the runs with the highest mean of ``scores`` ``[chunk tokens]``. Runs have ``width`` tokens and do not cross
    chunks, so they may be shorter at the end of a chunk."""
    # Uses numpy, because torch would wake up its threads for each of these many small steps.
    runs = -(-assembled.lengths // width)
    run_of = np.repeat(runs.cumsum() - runs, assembled.lengths) + assembled.places // width
    mean = np.bincount(run_of, weights=scores.double().cpu().numpy()) / np.bincount(run_of)
    chosen = np.zeros(len(run_of), dtype=bool) if given is None else given.numpy().copy()
    chosen[np.flatnonzero(chosen)[count:]] = False
    room = count - int(chosen.sum())
    # Whole runs from best to worst while they fit, then the first tokens of the next run. Ties: the earlier run wins.
    best = np.argsort(-mean, kind="stable")
    taken = np.bincount(run_of, weights=~chosen)[best].cumsum()
    whole = int(np.searchsorted(taken, room, side="right"))
    is_whole = np.zeros(len(mean), dtype=bool)
    is_whole[best[:whole]] = True
    if whole < len(best):
        rest = np.flatnonzero((run_of == best[whole]) & ~chosen)
        chosen[rest[: room - int(taken[whole - 1] if whole else 0)]] = True
    return torch.from_numpy(chosen | is_whole[run_of])
