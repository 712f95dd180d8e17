"""Measures whether the set of computed tokens can shrink between the layers of a model."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvmosaic.engines.vllm.forward.decoder_layers import DecoderLayers, measure_layers
from kvmosaic.engines.vllm.forward.narrowing import Narrowing, Thin
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward

TOKENS = 8
"""Number of tokens of a trial. All of them are in one block."""
KEPT = [2, 3, 7]
"""Tokens of a trial that are not dropped. A model that joins the rows of several ranks, because it expects 8 of them,
gets other tokens at these places, however many ranks there are."""
ROUNDING_FACTOR = 4.0
"""Maximum error of a trial, in units of the measured rounding."""
SMALL_EXACT, SMALL_HALF = 1e-4, 3e-2
"""Relative errors below this, in single and in half precision, are not compared with rounding. Rows of other tokens
give 1e-1 and above."""
ATTEMPTS = 3
"""Number of trials that have to fail: with a mixture of experts, one may fail by chance."""
_NO_LAYERS = DecoderLayers((), ())


def layers_that_narrow(
    forward: SparseForward, model: torch.nn.Module, vocabulary: int, ranks: Ranks
) -> DecoderLayers | None:
    """The decoder layers of vLLM's ``model`` with ``vocabulary`` token ids; ``None`` if tokens cannot be dropped
    between them on some rank. Only block 0 is written, which vLLM never uses. All ranks call this together."""
    if min(forward.kv.block_sizes) < TOKENS or not forward.can_narrow:
        return None

    def agree(mine: bool) -> bool:
        """Whether all ranks say so. Otherwise one of them would go on alone, and wait for the others."""
        return int(ranks.sum(torch.tensor(int(mine)))) == ranks.count

    def compute(tokens: int, attended: Callable[[int], None]) -> None:
        def note(layer: int, *rest: object) -> None:
            attended(layer)

        _compute(forward, [_run(forward, [0] * tokens, 0)], _NO_LAYERS, note)

    layers = measure_layers(model, len(forward.kv), compute)
    if not agree(layers is not None) or layers is None:
        return None
    for attempt in range(ATTEMPTS):
        draw = random.Random(attempt)
        if agree(_is_right(forward, layers, [draw.randrange(vocabulary) for _ in range(TOKENS)])):
            return layers
    return None


def _is_right(forward: SparseForward, layers: DecoderLayers, tokens: list[int]) -> bool:
    """Whether some tokens get the same K and V in all layers, if the others are dropped behind the first one. The
    cache has the others' KV from a pass before."""
    whole, alone = _run(forward, tokens, 0), [_run(forward, [tokens[each]], each) for each in KEPT]
    is_kept = np.isin(np.arange(TOKENS), KEPT)
    expected = [rows[KEPT] for rows in _noted(forward, [whole], layers, None)]
    rounded = _noted(forward, alone, layers, None)
    narrowed = _noted(forward, [whole], layers, is_kept)
    if len(narrowed) < len(expected):
        return False
    narrowed[0] = narrowed[0][KEPT]
    small = SMALL_EXACT if expected[0].dtype == torch.float32 else SMALL_HALF
    allowed = ROUNDING_FACTOR * _distance(rounded, expected) + small
    return len(narrowed[1]) == len(KEPT) and _distance(narrowed, expected) <= allowed


def _noted(
    forward: SparseForward, runs: Sequence[Run], layers: DecoderLayers, kept: np.ndarray | None
) -> list[torch.Tensor]:
    """K and V of runs, layer by layer, ``[tokens, columns]``. Behind the first layer, only tokens that are ``kept``
    (``[tokens]`` bool) are computed. The list is shorter if the model cannot do this."""
    noted: list[torch.Tensor] = []

    def note(layer: int, left: np.ndarray, k: torch.Tensor, v: torch.Tensor) -> np.ndarray | None:
        noted.append(torch.cat([k.flatten(1), v.flatten(1)], dim=1))
        return kept if layer == 0 else None

    _compute(forward, runs, layers, note)
    return noted


def _compute(forward: SparseForward, runs: Sequence[Run], layers: DecoderLayers, thin: Thin) -> None:
    forward.narrow(Narrowing(forward.kv.make_pass(runs), layers, thin))


def _run(forward: SparseForward, tokens: Sequence[int], start: int) -> Run:
    return Run(tokens, start, [[0] for _ in forward.kv.block_sizes])


def _distance(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """The largest relative distance of a layer."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs)
