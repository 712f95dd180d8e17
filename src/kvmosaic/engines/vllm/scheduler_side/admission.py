"""Which requests reuse chunks, and how much of that work fits into a step."""

from typing import NamedTuple

from kvmosaic.blend import policy_named
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import Line
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.shape import EngineShape

TRIAL_SHARE = 0.05
"""Maximum share of all time that trying a refused option again may cost."""
FILL_SHARE = 0.5
"""Share of a full prefill step's time that a step may spend on filling in the background."""
LEAST_FILL_SHARE = 0.125
"""Share of a step's tokens that it may always fill, however long that takes. Otherwise nothing might ever be
filled."""
LOAD_SHARE = 0.4
"""Share of a full prefill step's time that a step may spend on loads, whatever vLLM computes in it."""
LONG_LOAD_SHARE = 0.5
"""Share of a full prefill step's time above which a load is done in slices, over several steps."""
LONE_SHARE = 1.0
"""Share of a full prefill step's time that a step may spend on a request if no other request runs. Requests that
arrive meanwhile wait for that step."""
SLICED_STEP_SHARE = 0.6
"""Maximum planned time of a step with slices, in full prefill steps, unless vLLM itself computes more in it."""
LEAST_SLICE_SHARE = 0.15
"""Minimum share of a step's tokens that it computes for a request in slices, whatever else the step does."""
MAX_PASS_SHARE = 0.25
"""Maximum share of a step's tokens that one more pass counts as: the measured line of costs is rough."""
MAX_QUESTION_TOKENS = 256
"""Maximum length of a question that is computed with a load."""
LONGEST_STEP = 1.25
"""Maximum planned time of a step with background fills, in full prefill steps. Predictions can be wrong, and no
request should wait for two full steps."""


class Judge:
    """Decides whether to use an option, by its predicted time and that of the alternative.

    An option is measured again only if it is used, and a misjudgement must not last. So each refusal saves up some
    time, and an option that is judged too slow is tried when the saved time covers the loss."""

    def __init__(self) -> None:
        self._put_by = 0.0

    def is_faster(self, predicted: float, otherwise: float) -> bool:
        """Whether to use the option. ``predicted`` is its time, ``otherwise`` that of the alternative, both in
        seconds."""
        loss = max(0.0, predicted - otherwise)
        if loss > self._put_by:
            self._put_by += TRIAL_SHARE * otherwise
            return False
        self._put_by -= loss
        return True


class _LoadCost(NamedTuple):
    """Cost of loading a request, in tokens whose prefill takes as long."""

    first: int
    """Work that its first step does in any case: filling, placing entries and choosing."""
    rest: int
    """Work that can be left to later steps: computing tokens."""


class Admission:
    """Predicts the cost of reuse from the ranks' measurements and the mirror, and keeps steps short."""

    def __init__(self, config: ChunkCacheConfig, shape: EngineShape, mirror: StoreMirror) -> None:
        self._fills_first = config.miss_policy == "fill-first"
        self._shape = shape
        self._mirror = mirror
        self._costs: dict[int, dict[str, Line]] = {}
        """Costs that each rank measured, by stage."""
        self._judge = Judge()
        self._tokens_in_step = 0
        """Cost of the coming step's loads, without slices, in tokens whose prefill takes as long."""
        self._has_slices = False
        """Whether the coming step computes a slice of a request."""

    def measured(self, rank: int, costs: dict[str, Line]) -> None:
        """Take the costs of stages that a rank reports."""
        self._costs[rank] = costs

    def tokens_to_compute(self, request: ChunkRequest, local: int) -> int:
        """Approximate number of tokens to compute for loading a prompt behind its first ``local`` tokens."""
        text, missing, stored = self._shares(request, local)
        filled = missing if self._fills(request, missing) else 0
        context = self._shape.computed_context(len(request.context)) if filled else 0
        return text + context + missing + int(request.ratio * (stored + filled))

    def load_end(self, request: ChunkRequest, local: int) -> int:
        """Position up to which a request is loaded: its question's start, or its last token."""
        question = request.prompt.question
        is_left = (
            not self._shape.loads_questions
            or len(question) > MAX_QUESTION_TOKENS
            or request.images is not None  # the question may have images, which vLLM reads
            # Fewer than a block may be the end of a system prompt, which may be stored.
            or self.tokens_to_compute(request, local) < self._shape.block_size
        )
        return question.start if is_left else question.end - 1

    def fills(self, request: ChunkRequest, local: int) -> bool:
        """Whether loading a request behind its first ``local`` tokens fills its missing chunks first, in one step.
        Otherwise it computes them as text, which can be done in slices."""
        return self._fills(request, self._shares(request, local)[1])

    def _fills(self, request: ChunkRequest, missing: int) -> bool:
        # More than that is filled in the background while its request waits. Whatever is still missing then could
        # not be stored, and others should not wait for it. An adapter may not be active in later steps.
        may_be_long = request.adapter is not None
        return self._fills_first and (
            may_be_long or missing + len(request.context) <= self.most_filled_at_once(request)
        )

    def most_filled_at_once(self, request: ChunkRequest) -> int:
        """Maximum number of tokens that the step that loads a request may fill, with their context."""
        return int(LONE_SHARE * self._shape.step_tokens) if request.is_alone else self.tokens_worth_filling()

    def choice_is_long(self, request: ChunkRequest, local: int) -> bool:
        """Whether choosing the recomputed tokens takes more of a step than loads may. Before a policy looks at the
        prompt, all text and missing chunks are computed in one go; for some policies, also all chunks through some
        layers. A set that shrinks from layer to layer is also computed in one go."""
        share = LONE_SHARE if request.is_alone else LOAD_SHARE
        return request.is_probed and self._tokens_to_choose(request, local) > share * self._shape.step_tokens

    def _tokens_to_choose(self, request: ChunkRequest, local: int) -> int:
        text, missing, stored = self._shares(request, local)
        policy = policy_named(request.policy)
        if policy.narrows:  # the pass that chooses also computes the chosen tokens, and text again
            filled = missing if self._fills(request, missing) else 0
            return filled + 2 * (text + missing - filled) + int(request.ratio * (stored + filled))
        return text + missing + stored * policy.chunk_layers // self._shape.num_layers

    def _load_cost(self, request: ChunkRequest, local: int) -> _LoadCost:
        text, missing, stored = self._shares(request, local)
        filled = missing if self._fills(request, missing) else 0
        first = filled + (self._shape.computed_context(len(request.context)) if filled else 0)
        question = request.load_end - request.prompt.question.start
        rest = text + missing - filled + int(request.ratio * (stored + filled)) + question
        if request.is_probed:  # text is computed twice: before the choice, and behind the chosen tokens
            first += self._tokens_to_choose(request, local) - filled
            policy = policy_named(request.policy)
            if policy.narrows:  # the pass that chooses also computes everything before the question
                rest = question
            elif not policy.chunk_layers:  # missing chunks are computed once, before the choice
                rest -= missing - filled
        # The pass that computes the rest counts once for all loads of a step.
        first += self.pass_tokens * ((filled > 0) + request.is_probed)
        return _LoadCost(first + self._tokens_in(self._seconds_beside(request, local, stored + filled)), rest)

    def _seconds_beside(self, request: ChunkRequest, local: int, placed: int) -> float:
        """Seconds that a load takes besides computing tokens, as far as they were measured."""
        seconds = self._seconds("remap", placed) if self._is_measured("remap") else 0.0
        if request.is_probed and self._is_measured("probe"):
            seconds += self._seconds("probe", request.prompt.question.start - local)
        return seconds

    def _tokens_in(self, seconds: float) -> int:
        """Number of tokens whose prefill takes as long; 0 if that was not measured."""
        if not self._is_measured("blend"):
            return 0
        full = self._seconds("blend", self._shape.step_tokens)
        return int(seconds / full * self._shape.step_tokens) if full > 0 else 0

    def _shares(self, request: ChunkRequest, local: int) -> tuple[int, int, int]:
        """Numbers of tokens between the first ``local`` and the question: in no chunk, in missing chunks, and in
        stored ones. Chunks that cannot be stored count as text."""
        missing = stored = 0
        for span, digest in request.chunks_from(local):
            tokens = span.end - max(span.start, local)
            if request.finds(digest, self._mirror):
                stored += tokens
            elif self._mirror.can_store(len(span)):
                missing += tokens
        return request.prompt.question.start - local - missing - stored, missing, stored

    def finds_all(self, request: ChunkRequest, local: int) -> bool:
        """Whether all chunks behind the first ``local`` tokens are stored, as far as is known."""
        return all(request.finds(digest, self._mirror) for _, digest in request.chunks_from(local))

    def is_faster(self, request: ChunkRequest, local: int) -> bool:
        """Whether reusing the stored chunks is predicted to be faster than a plain prefill."""
        ahead = request.prompt.question.start - local
        computed = self.tokens_to_compute(request, local)
        if not (self._is_measured("blend") and self._is_measured("remap")):
            return computed < ahead  # too little was measured yet
        request.predicted = self._seconds("blend", computed) + self._seconds("remap", ahead - computed)
        if request.is_probed and self._is_measured("probe"):
            request.predicted += self._seconds("probe", ahead)
        return computed < ahead and self._judge.is_faster(request.predicted, self._seconds("blend", ahead))

    def why_not(self, request: ChunkRequest, local: int) -> Fallback:
        """Why a plain prefill is better than reusing the stored chunks: either nothing would be saved because chunks
        are not stored, or reuse is slower anyway."""
        ahead = request.prompt.question.start - local
        text, missing, stored = self._shares(request, local)
        saves_nothing = self.tokens_to_compute(request, local) >= ahead
        would_save = text + int(request.ratio * (missing + stored)) < ahead
        return Fallback.NOT_STORED if saves_nothing and would_save else Fallback.SLOWER

    def prefill_seconds(self, tokens: int) -> float | None:
        """Predicted seconds of computing ``tokens`` tokens; ``None`` if that was not measured."""
        return self._seconds("blend", tokens) if self._is_measured("blend") else None

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds of a full prefill step; ``None`` if that was not measured."""
        return self.prefill_seconds(self._shape.step_tokens)

    def is_long(self, request: ChunkRequest, local: int) -> bool:
        """Whether loading a request takes so much of a step that it is done in slices, over several steps."""
        share = LONE_SHARE if request.is_alone else LONG_LOAD_SHARE
        return sum(self._load_cost(request, local)) > int(share * self._shape.step_tokens) - self.pass_tokens

    def exceeds_step(self, request: ChunkRequest, local: int) -> bool:
        """Whether loading a request at once takes longer than vLLM's longest step."""
        return sum(self._load_cost(request, local)) > self._shape.step_tokens

    def still_lacks_room(self, request: ChunkRequest, local: int) -> bool:
        """Whether the cost that was computed when the request last lacked room is still too high. vLLM asks about all
        waiting requests in every step, so nothing is computed again for those that have to wait anyway."""
        return (
            not self._is_empty
            and request.needed is not None
            and request.needed[0] == local
            and request.needed[1] > self._room
        )

    def has_room(self, request: ChunkRequest, local: int) -> bool:
        """Whether the coming step has room for a further request: other requests' decoding must not wait for many
        blends at once."""
        if self._is_empty:
            return True
        request.needed = local, sum(self._load_cost(request, local))
        return request.needed[1] <= self._room

    def admit(self, request: ChunkRequest, local: int) -> None:
        """Count a request that the coming step loads, or begins to load in slices."""
        cost = self._load_cost(request, local)
        self._tokens_in_step += cost.first if request.is_in_slices else sum(cost)
        self._has_slices |= request.is_in_slices

    def begin_step(self, *, has_slices: bool) -> None:
        """Begin to plan the next step."""
        self._tokens_in_step = 0
        self._has_slices = has_slices

    def slices_are_done(self) -> None:
        """No request is loaded in slices any more."""
        self._has_slices = False

    def slice_tokens(self, scheduled: int) -> int:
        """Number of tokens that a step computes for each request in slices, if vLLM computes ``scheduled`` tokens in
        it."""
        planned = int((SLICED_STEP_SHARE if scheduled else LONE_SHARE) * self._shape.step_tokens)
        return max(self._least_slice, planned - scheduled - self._tokens_in_step - self.pass_tokens)

    def tokens_to_fill(self, scheduled: int) -> int:
        """Number of tokens that a step may compute to fill chunks in the background, if vLLM computes ``scheduled``
        tokens in it."""
        loaded = self._tokens_in_step + (self.slice_tokens(scheduled) if self._has_slices else 0)
        taken = scheduled + loaded + (self.pass_tokens if loaded else 0)
        room = min(int(LONGEST_STEP * self._shape.step_tokens) - taken, self.tokens_worth_filling())
        return max(1, room, int(LEAST_FILL_SHARE * self._shape.step_tokens))

    @property
    def _is_empty(self) -> bool:
        """Whether the coming step loads nothing yet."""
        return not self._tokens_in_step and not self._has_slices

    @property
    def _room(self) -> int:
        """Tokens that further loads of the coming step may take."""
        return self._room_for_loads - self._tokens_in_step - (self._least_slice if self._has_slices else 0)

    @property
    def _room_for_loads(self) -> int:
        """Tokens that all loads of a step may take, except slices."""
        return int(LOAD_SHARE * self._shape.step_tokens) - self.pass_tokens

    @property
    def pass_tokens(self) -> int:
        """Fixed time of one more pass of the model, for any number of tokens. The unit is tokens whose prefill takes
        as long."""
        if not self._is_measured("blend"):
            return 0
        fixed = self._tokens_in(max(costs["blend"].fixed for costs in self._costs.values()))
        return min(fixed, int(MAX_PASS_SHARE * self._shape.step_tokens))

    @property
    def _least_slice(self) -> int:
        return max(1, int(LEAST_SLICE_SHARE * self._shape.step_tokens))

    def tokens_worth_filling(self) -> int:
        """Number of tokens whose filling takes :data:`FILL_SHARE` of a full step's time."""
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
        """Predicted seconds of a stage on the slowest rank."""
        return max(costs[stage].seconds(tokens) for costs in self._costs.values())
