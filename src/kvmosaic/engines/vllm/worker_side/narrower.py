"""Computes choices whose set of tokens shrinks from layer to layer."""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from kvmosaic.blend import policy_named
from kvmosaic.engines.vllm.forward.decoder_layers import DecoderLayers
from kvmosaic.engines.vllm.forward.narrowing import Narrowing
from kvmosaic.engines.vllm.forward.narrowing_trial import layers_that_narrow
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.messages import ChunkLoad
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.blender import Choice
from kvmosaic.engines.vllm.worker_side.probe import VllmProbe

logger = logging.getLogger(__name__)


class Narrower:
    """Gives such a choice a pass of its own. The model's layers are measured when the first one comes."""

    def __init__(
        self, forward: SparseForward, model: torch.nn.Module, vocabulary: int, ranks: Ranks, timer: StageTimer
    ) -> None:
        """``model`` is vLLM's, with ``vocabulary`` token ids."""
        self._forward = forward
        self._model = model
        self._vocabulary = vocabulary
        self._ranks = ranks
        self._timer = timer
        self._layers: DecoderLayers | None = None
        self._is_measured = False

    @property
    def cannot(self) -> bool:
        """Whether it was found that sets cannot shrink in this model."""
        return self._is_measured and self._layers is None

    def can_serve(self, load: ChunkLoad) -> bool:
        """Whether a load's policy can be served: its set does not shrink, or can shrink in this model. All ranks call
        this together."""
        if not 0 < load.ratio < 1 or not policy_named(load.policy).narrows:
            return True
        if not self._is_measured:
            self._measure(load.policy)
        return self._layers is not None

    def _measure(self, policy: str) -> None:
        self._layers = self._ranks.together(
            lambda: layers_that_narrow(self._forward, self._model, self._vocabulary, self._ranks),
            "measuring the model's layers",
        )
        self._is_measured = True
        if self._layers is None and self._ranks.rank == 0:
            logger.warning(
                "policy %s: sets cannot shrink from layer to layer in this model, so its requests are prefilled; "
                "give one layer",
                policy,
            )

    def fits(self, tokens: int) -> bool:
        """Whether a pass has room for so many tokens."""
        return tokens <= self._forward.step_tokens

    def compute(
        self, runs: Sequence[Run], lasting: np.ndarray, probe: VllmProbe, choice: Choice
    ) -> tuple[np.ndarray, ...] | None:
        """Compute the runs of a load. Their tokens, in ascending order, are those of its choice and ``lasting`` ones,
        ``[tokens]`` bool, which are computed in all layers. Returns the positions that each check kept, or ``None``
        if it failed on some rank; the KV of chunks is then undefined."""
        # Ranks may have forgotten different choices, but have to measure the same ones.
        if not self._ranks.all_have([choice.kept is not None])[0]:
            choice = choice._replace(kept=None)
        positions = np.concatenate([np.arange(run.start, run.end) for run in runs])

        def work() -> tuple[np.ndarray, ...]:
            assert self._layers is not None
            thinning = _Thinning(choice, positions, lasting, probe, self._ranks)
            problem = self._forward.narrow(Narrowing(self._forward.kv.make_pass(runs), self._layers, thinning.thin))
            if problem is not None:  # the same on all ranks
                raise RuntimeError(problem)
            return tuple(thinning.kept)

        # Its time says nothing about other passes, which may have compiled code and CUDA graphs.
        with self._timer.stage("blend"):
            return self._ranks.together(work, "computing fewer tokens from layer to layer")


class _Thinning:
    """The tokens of a choice that its checks keep."""

    def __init__(
        self, choice: Choice, positions: np.ndarray, lasting: np.ndarray, probe: VllmProbe, ranks: Ranks
    ) -> None:
        """``positions``: those of all tokens of the pass, ``[tokens]``."""
        self._checks = choice.checks
        self._known = choice.kept
        self._positions = positions
        self._lasting = lasting
        self._ranks = ranks
        self._place = np.cumsum(~lasting) - 1
        """Index of each token among those that do not last."""
        # Read before the pass overwrites it.
        chosen = positions[~lasting]
        checks = self._checks if self._known is None else ()
        self._reused = [probe.reused(check.layer, check.part, chosen) for check in checks]
        self.kept = [np.empty(0, dtype=positions.dtype) for _ in choice.checks]
        """The positions that each check kept; none, if the pass ended before it."""

    def thin(self, layer: int, left: np.ndarray, k: torch.Tensor, v: torch.Tensor) -> np.ndarray | None:
        """The tokens that a check of a layer keeps, ``[tokens]`` bool, of those that are ``left``."""
        index = next((index for index, check in enumerate(self._checks) if check.layer == layer), None)
        if index is None:
            return None
        kept = self._lasting[left].copy()
        if self._known is not None:
            kept |= np.isin(self._positions[left], self._known[index])
        else:
            kept[self._farthest(index, left, k, v)] = True
        self.kept[index] = self._positions[left][kept & ~self._lasting[left]]
        return kept

    def _farthest(self, index: int, left: np.ndarray, k: torch.Tensor, v: torch.Tensor) -> np.ndarray:
        """Indices of the tokens whose K or V is farthest from the reused one."""
        check, passing = self._checks[index], np.flatnonzero(~self._lasting[left])
        computed = k if check.part == "k" else v
        fresh = computed[torch.from_numpy(passing).to(computed.device)].transpose(0, 1)
        places = torch.from_numpy(self._place[left[passing]])
        reused = self._reused[index][:, places.to(computed.device)]
        # Each rank has some heads, and all ranks have to keep the same tokens.
        distance = self._ranks.sum((fresh.float() - reused.float()).square().sum((0, 2)))
        best = distance.topk(min(check.keep, len(distance))).indices
        return passing[self._ranks.first(best.numpy())]
