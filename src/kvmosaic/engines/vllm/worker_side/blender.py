"""Asks policies which chunk tokens of a request are recomputed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmosaic.blend import choose, policy_named
from kvmosaic.blend.base import Check
from kvmosaic.core.entry import ChunkKV
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.messages import ChunkLoad
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.images import LoadImages
from kvmosaic.engines.vllm.worker_side.probe import VllmProbe

REMEMBERED = 1024
"""Maximum number of prompts whose choice is remembered."""
REMEMBERED_TOKENS = 2**24
"""Maximum number of chosen tokens that are remembered, of all prompts together."""


class Choice(NamedTuple):
    """The tokens of a prompt's chunks to recompute."""

    positions: np.ndarray
    """Ascending, ``[tokens]``."""
    computed_layer: int | None = None
    """Layer up to which a probe computed all chunk tokens and left them in the blocks, if it did."""
    probed: bool | None = None
    """Whether the policy probed the prompt; ``None`` if no policy was asked."""
    checks: tuple[Check, ...] = ()
    """Layers at which the set shrinks; empty: all tokens are computed in all layers."""
    kept: tuple[np.ndarray, ...] | None = None
    """The positions that each check kept, once they were computed."""

    @property
    def size(self) -> int:
        """Number of its positions."""
        return len(self.positions) + sum(map(len, self.kept or ()))


class Blend(NamedTuple):
    """A blend whose tokens are still to be chosen."""

    load: ChunkLoad
    probe: VllmProbe
    known: Choice | None
    """Earlier choice for the same prompt, if there is one."""
    needs_context: bool
    """Whether all tokens in no chunk before the question have to be computed before the choice."""
    asks_at: tuple[int, ...] = ()
    """Layers at which the policy will ask for the question's attention."""


class Blender:
    """Makes one choice per prompt: vLLM's prefix cache may bring back a part of a blended prompt, and the rest then
    has to be blended as before."""

    def __init__(
        self, forward: SparseForward, paged: RequestBlocks, ranks: Ranks, timer: StageTimer, images: LoadImages
    ) -> None:
        self._forward = forward
        self._timer = timer
        self._paged = paged
        self._ranks = ranks
        self._images = images
        is_full = ranks.of_all_layers([layer.window is None for layer in forward.kv.layers])
        self._full_layers = [layer for layer, sees_all in enumerate(is_full) if sees_all]
        self._choices: dict[bytes, Choice] = {}
        self._remembered = 0
        """Number of chosen tokens of all remembered choices."""

    def clear(self) -> None:
        """Forget all choices."""
        self._choices.clear()
        self._remembered = 0

    def prepare(self, load: ChunkLoad, moves: Sequence[tuple[ChunkKV, int]]) -> Blend | None:
        """A blend of the chunks that ``moves`` put in place; ``None`` if that failed on some rank."""
        images = self._images.of(load)
        probe = VllmProbe(load, moves, self._forward, self._paged, self._ranks, self._full_layers, images)
        if not moves or load.ratio in (0, 1):
            return Blend(load, probe, None, False)
        known = self._choices.get(load.blend_digest())
        if not self._ranks.all_have([known is not None])[0]:  # a rank may have failed to choose before
            known = None
        if known is not None:
            return Blend(load, probe, known, known.computed_layer is not None)
        policy = policy_named(load.policy)
        plan = self._ranks.together(
            lambda: (policy.probes(probe, load.ratio), tuple(policy.asks_at(probe, load.ratio))),
            f"policy {load.policy}",
        )
        return None if plan is None else Blend(load, probe, None, *plan)

    def choose(self, blends: Sequence[Blend]) -> list[Choice | None]:
        """The tokens to recompute of each blend, from its load's start on. ``None`` if choosing failed on some rank;
        the KV of chunks is then undefined."""
        asking = [blend for blend in blends if _is_looked_at(blend)]
        if not asking:
            return [self._choose(blend) for blend in blends]
        # The time of a choice that does not look at the prompt says nothing about those that do.
        with self._timer.stage("probe", sum(load.prompt.question.start - load.start for load, *_ in asking)):
            self._ask_together(asking)
            return [self._choose(blend) for blend in blends]

    def _ask_together(self, blends: Sequence[Blend]) -> None:
        """Compute what policies will ask about several prompts in one pass. If that fails, each asks alone."""
        asked: dict[tuple[int, ...], list[VllmProbe]] = {}
        for blend in blends:
            if blend.asks_at:
                asked.setdefault(blend.asks_at, []).append(blend.probe)
        for layers, probes in asked.items():
            if len(probes) > 1:
                weights = self._ranks.together(lambda: VllmProbe.ask(probes, layers), "probing questions")  # noqa: B023
                for probe, each in zip(probes, weights or (), strict=weights is not None):
                    probe.know(layers, each)

    def _choose(self, blend: Blend) -> Choice | None:
        load, probe, choice, *_ = blend
        if not probe.chunk_tokens or load.ratio == 0:
            return Choice(np.empty(0, dtype=np.int64))
        if load.ratio == 1:
            chosen = probe.positions().numpy()
            return Choice(chosen[chosen >= load.start])
        if choice is None:
            choice = self._ranks.together(lambda: self._ask(load, probe), f"policy {load.policy}")
            if choice is None:
                return None
            choice = choice._replace(positions=self._ranks.first(choice.positions))
            # Otherwise it is no choice for the whole prompt, or a better one can be made when there is time for it.
            if len(probe.prompt.chunks) == len(load.prompt.chunks) and load.may_probe:
                digest = load.blend_digest()
                if digest not in self._choices:
                    self._remembered += choice.size
                    self._choices[digest] = choice
        elif choice.computed_layer is not None:
            layer = choice.computed_layer
            if self._ranks.together(lambda: probe.compute_chunks(layer), "computing chunks") is None:
                return None
        while len(self._choices) > REMEMBERED or self._remembered > REMEMBERED_TOKENS:
            self._remembered -= self._choices.pop(next(iter(self._choices))).size
        return choice._replace(positions=choice.positions[choice.positions >= load.start])

    def note_kept(self, load: ChunkLoad, choice: Choice, kept: tuple[np.ndarray, ...]) -> None:
        """Remember the positions that the checks of a choice kept, if all of its positions were computed."""
        known = self._choices.get(load.blend_digest())
        if known is not None and known.kept is None and np.array_equal(known.positions, choice.positions):
            self._choices[load.blend_digest()] = known._replace(kept=kept)
            self._remembered += sum(map(len, kept))

    def _ask(self, load: ChunkLoad, probe: VllmProbe) -> Choice:
        chosen = choose(policy_named(load.policy), probe, load.ratio)
        positions = np.array(chosen.positions, dtype=np.int32)
        return Choice(positions, probe.computed_layer, probe.was_probed, chosen.checks)


def _is_looked_at(blend: Blend) -> bool:
    """Whether a policy is asked that may look at the prompt."""
    load, probe, known, *_ = blend
    is_asked = known is None and bool(probe.chunk_tokens) and 0 < load.ratio < 1
    return is_asked and load.may_probe and policy_named(load.policy).reads_content
