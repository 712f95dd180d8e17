"""Which requests are put together from chunks, and how much of that fits into a step."""

from kvmosaic.blend import policy_named
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import Line
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.shape import EngineShape

TRIAL_SHARE = 0.05
"""Share of all time that trying a refused way again may cost."""
FILL_SHARE = 0.5
"""Share of the time of a full prefill step that a step may fill in the background."""
LEAST_FILL_SHARE = 0.125
"""Share of a step's tokens that it may fill however long that takes, or nothing would ever be filled."""


class Judge:
    """Whether to do something that is predicted to take so long, rather than something else.

    Only what is done is measured again, and a misjudgement must not last. So each refusal puts some time by, and what
    is judged too slow is tried when there is enough to pay for it."""

    def __init__(self) -> None:
        self._put_by = 0.0

    def is_faster(self, predicted: float, otherwise: float) -> bool:
        """``predicted`` and ``otherwise``: seconds."""
        loss = max(0.0, predicted - otherwise)
        if loss > self._put_by:
            self._put_by += TRIAL_SHARE * otherwise
            return False
        self._put_by -= loss
        return True


class Admission:
    """Predicts what reuse costs, from what ranks measured and the mirror knows, and keeps steps short."""

    def __init__(self, config: ChunkCacheConfig, shape: EngineShape, mirror: StoreMirror) -> None:
        self._fills_first = config.miss_policy == "fill-first"
        self._shape = shape
        self._mirror = mirror
        self._costs: dict[int, dict[str, Line]] = {}
        """What each rank measured."""
        self._judge = Judge()
        self._tokens_in_step = 0
        """Approximate tokens that the coming step computes for chunks, beside vLLM's own."""

    def measured(self, rank: int, costs: dict[str, Line]) -> None:
        """A rank reports what stages take."""
        self._costs[rank] = costs

    def tokens_to_compute(self, request: ChunkRequest, local: int) -> int:
        """Approximate tokens that are computed to bring what follows the first ``local`` tokens."""
        text, missing, stored = self._shares(request, local)
        context = self._shape.computed_context(len(request.context)) if missing and self._fills_first else 0
        blended = stored + (missing if self._fills_first else 0)
        return text + context + missing + int(request.ratio * blended)

    def choice_is_long(self, request: ChunkRequest, local: int) -> bool:
        """Whether choosing what is recomputed takes more than a step: a policy that looks at the prompt has all text
        and missing chunks computed before it does, in one go, and some all chunks through some layers."""
        if not request.is_probed:
            return False
        text, missing, stored = self._shares(request, local)
        layers = policy_named(request.policy).chunk_layers
        looked_at = stored * layers // self._shape.num_layers
        return text + missing + looked_at > self._shape.step_tokens

    def _shares(self, request: ChunkRequest, local: int) -> tuple[int, int, int]:
        """Of the tokens between the first ``local`` and the question: those in no chunk, in missing chunks, in stored
        ones."""
        missing = stored = 0
        for span, digest in request.chunks_from(local):
            tokens = span.end - max(span.start, local)
            if self._mirror.has(digest):
                stored += tokens
            else:
                missing += tokens
        return request.prompt.question.start - local - missing - stored, missing, stored

    def is_faster(self, request: ChunkRequest, local: int) -> bool:
        """Whether reusing what there is is predicted to be faster than a plain prefill."""
        ahead = request.prompt.question.start - local
        computed = self.tokens_to_compute(request, local)
        if not all({"blend", "remap"} <= costs.keys() for costs in self._costs.values()):
            return computed < ahead  # too little was measured yet
        request.predicted = self._seconds("blend", computed) + self._seconds("remap", ahead - computed)
        if request.is_probed and all("probe" in costs for costs in self._costs.values()):
            request.predicted += self._seconds("probe", ahead)
        return computed < ahead and self._judge.is_faster(request.predicted, self._seconds("blend", ahead))

    def why_not(self, request: ChunkRequest, local: int) -> Fallback:
        """Why a plain prefill is better than reusing what there is: nothing would be saved because chunks are not
        stored, or reuse is slower all the same."""
        ahead = request.prompt.question.start - local
        text, missing, stored = self._shares(request, local)
        saves_nothing = self.tokens_to_compute(request, local) >= ahead
        would_save = text + int(request.ratio * (missing + stored)) < ahead
        return Fallback.NOT_STORED if saves_nothing and would_save else Fallback.SLOWER

    def first_slice(self, request: ChunkRequest, local: int) -> int | None:
        """Tokens to compute in the first step, where all of them would take longer than a step; else ``None``."""
        # Asking the question takes about as long as computing half a step's tokens.
        room = self._shape.step_tokens // 2 if request.is_probed else self._shape.step_tokens
        return room if self.tokens_to_compute(request, local) > room else None

    def has_room(self, request: ChunkRequest, local: int) -> bool:
        """Whether the coming step has room for a request beside those it has: others' decoding must not wait for many
        blends at once."""
        if not self._tokens_in_step:
            return True
        room = self._shape.step_tokens - self._tokens_in_step
        # vLLM asks about all that wait in every step; what was too much stays so until the request has its turn.
        if request.needed is not None and request.needed[0] == local and request.needed[1] > room:
            return False
        request.needed = local, self.tokens_to_compute(request, local)
        return request.needed[1] <= room

    def admit(self, request: ChunkRequest, local: int) -> None:
        """The coming step loads a request."""
        self._tokens_in_step += self.tokens_to_compute(request, local)

    def begin_step(self, *, is_full: bool) -> None:
        """The next step is planned from here on; it is full while requests are loaded in slices."""
        self._tokens_in_step = self._shape.step_tokens if is_full else 0

    def tokens_to_fill(self, scheduled: int) -> int:
        """Tokens that a step may compute to fill chunks in the background, of which vLLM computes ``scheduled``. With
        these and with what it loads, it computes no more than two full steps would: then nobody waits longer."""
        left = 2 * self._shape.step_tokens - scheduled - self._tokens_in_step
        return max(0, min(left, self.tokens_worth_filling()))

    def tokens_worth_filling(self) -> int:
        """Tokens that take a share of a full step's time to fill."""
        step = self._shape.step_tokens
        if not self._is_measured("fill"):
            return max(1, int(FILL_SHARE * step))
        full = self._seconds("fill", step)
        if self._is_measured("blend"):
            full = min(full, self._seconds("blend", step))
        room = step
        for costs in self._costs.values():
            line = costs["fill"]
            if line.per_token > 0:
                room = min(room, int((FILL_SHARE * full - line.fixed) / line.per_token))
        return max(1, room, int(LEAST_FILL_SHARE * step))

    def _is_measured(self, stage: str) -> bool:
        return bool(self._costs) and all(stage in costs for costs in self._costs.values())

    def _seconds(self, stage: str, tokens: int) -> float:
        """What a stage takes on the slowest rank."""
        return max(costs[stage].seconds(tokens) for costs in self._costs.values())
