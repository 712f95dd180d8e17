"""Worker side: asks policies which chunk tokens of a request are recomputed."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvmosaic.blend import choose, policy_named
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.messages import ChunkLoad
from kvmosaic.engines.vllm.paged.base import RequestBlocks
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.probe import VllmAssembled

logger = logging.getLogger(__name__)

REMEMBERED = 1024
"""For so many prompts it is remembered which tokens were blended."""


class _Choice(NamedTuple):
    positions: np.ndarray
    """Ascending, ``[tokens]`` int32."""
    computed_layer: int | None
    """Up to this layer a probe computed all chunk tokens, and left them so."""


class Blender:
    """Makes a choice once for a prompt: vLLM's prefix cache may bring back a part of what was blended, and the rest
    has to become what it was."""

    def __init__(self, forward: SparseForward, blocks: RequestBlocks, ranks: Ranks, timer: StageTimer) -> None:
        self._forward = forward
        self._timer = timer
        self._blocks = blocks
        self._ranks = ranks
        self._choices: dict[bytes, _Choice] = {}

    def clear(self) -> None:
        """Forget all choices."""
        self._choices.clear()

    def positions(
        self, load: ChunkLoad, moves: Sequence[tuple[ChunkKV, int]], compute_fresh: Callable[[], None]
    ) -> np.ndarray:
        """Tokens to recompute, ``[tokens]``, ascending, of the chunks that ``moves`` put in place, from
        ``load.first`` on. ``compute_fresh`` computes whatever else stands before the question, in this request and in
        those before it."""
        spans = tuple(Span(at, at + len(entry.tokens)) for entry, at in moves)
        if not spans or load.ratio == 0:
            return np.empty(0, dtype=np.int64)
        if load.ratio == 1:
            return np.concatenate([np.arange(max(span.start, load.first), span.end) for span in spans])
        assembled = VllmAssembled(
            ChunkedPrompt(load.prompt.token_ids, spans),
            load.prompt.question,
            moves,
            load.first,
            [(*row, *load.spare) for row in load.blocks],
            self._forward,
            self._blocks,
            self._ranks,
            compute_fresh,
        )
        digest = load.blend_digest()
        choice = self._choices.get(digest)
        if choice is None:
            choice = self._choose(load, assembled)
            if len(spans) == len(load.prompt.chunks):  # a choice among some of them is not that of the whole prompt
                self._choices[digest] = choice
        elif choice.computed_layer is not None:
            assembled.compute_chunks(choice.computed_layer)
        while len(self._choices) > REMEMBERED:
            del self._choices[next(iter(self._choices))]
        return choice.positions[choice.positions >= load.first]

    def _choose(self, load: ChunkLoad, assembled: VllmAssembled) -> _Choice:
        policy = policy_named(load.policy)
        try:
            # What a choice takes that does not look at the prompt says nothing of the others.
            with self._timer.stage("probe", load.prompt.question.start - load.first if policy.reads_content else 0):
                chosen = choose(policy, assembled, load.ratio).positions
        except Exception:
            logger.exception("policy %s failed; request %s is recomputed as a whole", load.policy, load.request_id)
            chosen = tuple(assembled.positions().tolist())
        return _Choice(self._ranks.first(np.array(chosen, dtype=np.int32)), assembled.computed_layer)
