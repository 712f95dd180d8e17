"""Decides whether reuse is worth it, and waits for what a request with chunks needs."""

import logging
from collections.abc import Iterator

from kvmosaic.blend import policy_named
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.limits import shown_id
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import ChunkFetch, StepWork
from kvmosaic.engines.vllm.scheduler_side.admission import Admission
from kvmosaic.engines.vllm.scheduler_side.backlog import FillBacklog
from kvmosaic.engines.vllm.scheduler_side.fair_queue import WaitingChunk
from kvmosaic.engines.vllm.scheduler_side.patience import patience_for
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.shape import EngineShape

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 30
"""Maximum time that a request waits for a step with room, or for chunks that are filled, in seconds. Then it is
served without them."""


class WaitingRoom:
    """Decides how requests that have no blocks yet proceed."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        shape: EngineShape,
        mirror: StoreMirror,
        admission: Admission,
        backlog: FillBacklog,
    ) -> None:
        self._config = config
        self._shape = shape
        self._mirror = mirror
        self._admission = admission
        self._backlog = backlog

    def matched(self, request: ChunkRequest, local: int, work: StepWork) -> int | Fallback | None:
        """Number of tokens after the first ``local`` that the worker loads, or why the request is served plainly;
        ``None`` while the request has to wait. Fetches are added to ``work``."""
        off_reason = self._mirror.off_reason
        if off_reason is not None and not request.begins_inside(local):
            return off_reason
        if self._mirror.cannot_narrow and request.narrows and not request.begins_inside(local):
            return Fallback.SHRINKING_SET  # workers would compute all of it in one step
        request.load_end = max(local, request.prompt.question.start)
        if request.load_end == local:
            return 0
        if not request.has_fetched and self._mirror.is_complete and not self._fetch(request, local, work):
            return self._admission.why_not(request, local)
        if request.has_arrived:
            if not self._is_worth_it(request, local):  # it may have lost chunks, or found more
                return self._admission.why_not(request, local)
            if self._is_being_filled(request, local) and request.has_patience(PATIENCE_SECONDS):
                return None
            # It may still have to wait for a step with room, and for blocks.
            if not self._admission.still_lacks_room(request, local):
                request.load_end = self._admission.load_end(request, local)
                self._limit_choice(request, local)
                if not request.begins_inside(local) and self._is_too_long(request, local):
                    if self._config.miss_policy == "fill-first" and request.adapter is not None:
                        self._backlog.add(self._missing(request, local))  # its adapter is active while it is answered
                    return Fallback.SLOWER
                if self._admission.has_room(request, local):
                    slow = self._slow(request, local)
                    if not slow:
                        return request.load_end - local
                    self._begin_fetch(request, slow, work)
                    return None
            has_to_wait = request.has_patience(PATIENCE_SECONDS) or request.begins_inside(local)
            return None if has_to_wait else Fallback.SLOWER
        patience = patience_for(sum(request.fetched.values()), self._admission)
        if request.has_patience_with_fetch(patience):
            return None
        if request.begins_inside(local):
            return request.load_end - local
        name = shown_id(request.request_id)
        logger.warning("request %s waited %.1f s for its chunks; it is prefilled", name, patience)
        return Fallback.SLOW_TIER

    def _fetch(self, request: ChunkRequest, local: int, work: StepWork) -> bool:
        """Have chunks fetched that are, or may be, in slower tiers. Returns ``False`` if a plain prefill is
        faster."""
        chunks = {digest: len(span) for span, digest in request.chunks_from(local)}
        # Other engines may have stored chunks in the meantime that this one does not know of.
        is_shared = self._mirror.may_lag_behind_others(is_alone=request.is_alone)
        unknown = {digest: chunks[digest] for digest in chunks if is_shared and not self._mirror.has(digest)}
        if not unknown and not self._is_worth_it(request, local):
            return False
        self._begin_fetch(request, self._slow(request, local) | unknown, work)
        return True

    def _slow(self, request: ChunkRequest, local: int) -> dict[bytes, int]:
        """Chunks in slower tiers that were not asked for yet, with their numbers of tokens: at first, or because
        memory lost them while the request waited."""
        return {
            digest: len(span)
            for span, digest in request.chunks_from(local)
            if digest not in request.fetched and not self._mirror.is_near(digest) and self._mirror.has(digest)
        }

    def _begin_fetch(self, request: ChunkRequest, chunks: dict[bytes, int], work: StepWork) -> None:
        """Have chunks fetched, and those of an earlier fetch of the request, which this one replaces."""
        tiers = {digest: self._mirror.tier(digest) for digest in chunks}
        request.fetched_from |= {digest: tier for digest, tier in tiers.items() if tier is not None}
        request.fetched = chunks | request.fetched
        request.wait_for(self._shape.ranks if request.fetched else 0)
        if request.fetched:
            work.fetches.append(ChunkFetch(request_id=request.request_id, chunks=tuple(request.fetched.items())))

    def _is_worth_it(self, request: ChunkRequest, local: int) -> bool:
        """Whether to reuse the stored chunks. Missing chunks are queued to be filled in the background."""
        if request.is_worth_it or self._config.miss_policy == "fill-first":
            return True
        self.fill_missing(request)
        if request.begins_inside(local):
            return True
        request.is_worth_it = self._admission.is_faster(request, local)
        return request.is_worth_it

    def fill_missing(self, request: ChunkRequest) -> None:
        """Have the chunks of a request that are not stored filled in the background, if that is the miss policy."""
        if self._config.miss_policy == "background" and not request.is_noted:
            request.is_noted = True
            self._backlog.add(self._missing(request))

    def _limit_choice(self, request: ChunkRequest, local: int) -> None:
        """Let the policy choose without a probe if others would wait too long for what the probe needs."""
        request.may_probe = True
        if policy_named(request.policy).can_skip_probe and self._admission.choice_is_long(request, local):
            request.may_probe = False

    def _is_too_long(self, request: ChunkRequest, local: int) -> bool:
        """Whether loading a request would keep all other requests waiting for too long. Requests with an adapter are
        not loaded in slices: their adapter may not be active in the steps before their own."""
        is_at_once = request.adapter is not None and self._admission.exceeds_step(request, local)
        return is_at_once or self._admission.choice_is_long(request, local)

    def _is_being_filled(self, request: ChunkRequest, local: int) -> bool:
        """Whether a request whose chunks are filled first waits until they are filled in the background. It does if
        they are more than a step has room for: filling them at once would keep all other requests waiting. It does
        not wait for chunks that were forgotten, or filled without being stored. A request with an adapter does not
        wait, because its adapter may not be active meanwhile."""
        if self._config.miss_policy != "fill-first" or request.adapter is not None:
            return False
        if request.lacking is None:
            every = list(self._missing(request, local))
            tokens = sum(len(chunk.tokens) for chunk in every) + len(request.context)
            request.lacking = []
            if tokens > self._admission.most_filled_at_once(request):
                self._backlog.add(every, is_awaited=True)
                request.lacking = [chunk.digest for chunk in reversed(every)]  # the last one is filled first
                request.filled = frozenset(request.lacking)
        while request.lacking and not self._is_still_coming(request, request.lacking[-1]):
            request.lacking.pop()
        return bool(request.lacking) and not (request.is_alone and self._admission.fills(request, local))

    def _is_still_coming(self, request: ChunkRequest, digest: bytes) -> bool:
        return not request.finds(digest, self._mirror) and self._backlog.is_coming(digest)

    def _missing(self, request: ChunkRequest, local: int = 0) -> Iterator[WaitingChunk]:
        """The chunks of a request behind the first ``local`` tokens that it does not find, and that can be filled and
        stored."""
        longest = self._shape.max_positions - len(request.context)
        for span, digest in request.chunks_from(local):
            can_be_filled = len(span) <= longest and self._mirror.can_store(len(span))
            if can_be_filled and not request.finds(digest, self._mirror):
                tokens = request.prompt.tokens_of(span)
                images = request.images_in(span)
                yield WaitingChunk(request.request_id, digest, tokens, request.context, request.adapter, images)
