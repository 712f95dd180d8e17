"""Reads requests: finds their chunks, and decides what to do with them."""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvmosaic.core.config import CLIENT_PARAMETERS, ChunkCacheConfig
from kvmosaic.core.discovery import Discovery
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.limits import MAX_CHUNKS, shown_id
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import Adapter
from kvmosaic.engines.vllm.parameters import RequestParameters
from kvmosaic.engines.vllm.scheduler_side.digests import ChunkDigests, salt_of
from kvmosaic.engines.vllm.scheduler_side.fair_queue import WaitingChunk
from kvmosaic.engines.vllm.scheduler_side.images import PromptImages
from kvmosaic.engines.vllm.scheduler_side.request import ChunkRequest
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from kvmosaic.engines.vllm.shape import EngineShape
from kvmosaic.engines.vllm.support import looks_inside, policy_served

logger = logging.getLogger(__name__)

MAX_NAMED = 100
"""Maximum number of unknown parameters that are named in the log."""
_NOT_SERVED = "request %s is served without the chunk cache: %s"


class Plan(NamedTuple):
    """The outcome of planning a request."""

    outcome: ChunkRequest | Fallback | None
    """The request with its chunks, the reason why it is served plainly, or ``None`` when it has no chunks."""
    absent: tuple[int, ...] = ()
    """Indices of its named documents that do not occur in its prompt."""
    to_fill: tuple[WaitingChunk, ...] = ()
    """Texts to fill as one chunk each, for later requests. This request does not need them."""


class Planner:
    """Turns a vLLM request into a :class:`ChunkRequest`, or says why not."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        parser: ChunkTokenParser,
        sink: tuple[int, ...],
        shape: EngineShape,
        mirror: StoreMirror,
        discovery: Discovery | None = None,
    ) -> None:
        """``discovery``: finds chunks that requests do not name; ``None`` if that is off."""
        self._discovery = discovery
        self._mirror = mirror
        self._config = config
        self._parser = parser
        self._sink = sink
        self._shape = shape
        self._named: set[str] = set()
        """Unknown parameters that were named in the log."""

    def plan(self, request: Any, params: RequestParameters, adapter: Adapter | None = None) -> Plan:
        """Plan a request with these parameters. ``adapter``: its adapter, if workers know that by its weights."""
        if not self._named.issuperset(params.unknown) and len(self._named) < MAX_NAMED:
            self._named.update(params.unknown)
            known = ", ".join(CLIENT_PARAMETERS)
            logger.warning("kv_transfer_params: unknown: %s; known: %s", ", ".join(params.unknown), known)
        if params.refused is not None:
            logger.warning(_NOT_SERVED, shown_id(request.request_id), params.problem)
            return Plan(params.refused)
        if not request.prompt_token_ids or not params.chunk_cache:
            return Plan(None)
        try:
            return self._plan(request, params, adapter)
        except KvmosaicError as error:
            logger.warning(_NOT_SERVED, shown_id(request.request_id), error)
        except Exception:  # a failure must affect only the client that caused it
            logger.exception(_NOT_SERVED, shown_id(request.request_id), "it cannot be read")
        return Plan(Fallback.BAD_PARAMETERS)

    def _plan(self, request: Any, params: RequestParameters, adapter: Adapter | None) -> Plan:
        absent: tuple[int, ...] = ()
        if params.boundaries is not None:
            prompt = self._parser.parse(request.prompt_token_ids, params.boundaries)
        else:
            named = self._parser.parse_named(
                request.prompt_token_ids, params.documents, params.question, params.seams
            )
            prompt, absent = named.prompt, named.absent
        ratio = self._config.recompute_ratio if params.recompute_ratio is None else params.recompute_ratio
        policy = self._config.policy if params.policy is None else params.policy
        policy_served(policy, self._shape.num_layers, self._shape.stages)
        reason, salt = _cannot_be_reused(request, adapter), salt_of(request.cache_salt, adapter)
        had_chunks, sources = bool(prompt.chunks), self._config.sources
        images = None
        if reason is None and (had_chunks or sources & {"images", "auto"}):
            images = self._images(request)
        prompt = prompt if images is None else images.mark(prompt)
        longer: tuple[Span, ...] = ()
        if self._discovery is not None and reason is None and params.boundaries is None:
            prompt, longer = self._with_runs(prompt, self._discovery, salt, images)
        if images is not None and "images" in sources:
            prompt = images.add_to(prompt, self._config.min_chunk_tokens, MAX_CHUNKS)
        if not prompt.chunks:
            return Plan(Fallback.MULTIMODAL if had_chunks else None, absent)
        if reason is None and looks_inside(policy, ratio) and any(map(self._shape.is_cut, map(len, prompt.chunks))):
            logger.warning(
                "request %s is prefilled: policy %s at ratio %g needs KV inside chunks, but layers with a sliding "
                "window store only a chunk's last %d tokens; start the engine with that policy and ratio, or with "
                "window_tails=false",
                *(shown_id(request.request_id), policy, ratio, self._shape.window_tail),
            )
            reason = Fallback.WINDOW
        if reason is not None:
            return Plan(reason, absent)
        first = prompt.chunks[0].start
        digests = ChunkDigests(self._config, self._sink, prompt, salt)
        hashes = tuple(digests.digest(span, first) for span in prompt.chunks)
        # Stand-ins for images are no tokens.
        readable = prompt if images is None else ChunkedPrompt(images.token_ids, prompt.chunks)
        turn_ends = tuple(self._parser.turn_ends(readable))
        context = digests.context(first)
        ours = ChunkRequest(request.request_id, prompt, ratio, policy, context, hashes, turn_ends, adapter, images)
        return Plan(ours, absent, tuple(self._to_fill(ours, longer, digests)))

    def _images(self, request: Any) -> PromptImages | None:
        """The images of a request. Workers cannot read them before a chunk that is computed after its system
        prompt."""
        is_usual = self._config.chunk_context == "alone"
        return PromptImages.of(request, can_read=self._shape.reads_images and is_usual)

    def _with_runs(
        self, prompt: ChunkedPrompt, discovery: Discovery, salt: bytes | None, images: PromptImages | None
    ) -> tuple[ChunkedPrompt, tuple[Span, ...]]:
        """The prompt with recurring texts as further chunks, and longer texts that should be stored."""
        digests = ChunkDigests(self._config, self._sink, prompt, salt)

        def is_stored(span: Span, first: int) -> bool:
            return self._mirror.has(digests.digest(span, first))

        found = discovery.find(prompt.token_array, prompt.chunks, None if salt is None else salt.hex(), is_stored)
        new, to_fill = found.chunks, found.to_fill
        if images is not None:
            new, to_fill = tuple(images.reusable(new)), tuple(images.reusable(to_fill))
        runs = new[: MAX_CHUNKS - len(prompt.chunks)]
        chunks = sorted([*prompt.chunks, *runs], key=lambda span: span.start)
        return ChunkedPrompt(prompt.token_ids, tuple(chunks)) if runs else prompt, to_fill

    def _to_fill(
        self, request: ChunkRequest, spans: tuple[Span, ...], digests: ChunkDigests
    ) -> Iterator[WaitingChunk]:
        """The chunks of ``spans`` that can be filled."""
        for span in spans:
            # A span that begins before the first chunk becomes the first chunk when it is used.
            first = min(span.start, request.prompt.chunks[0].start)
            context = digests.context(first)
            if len(span) + len(context) <= self._shape.max_positions:
                tokens, digest = request.prompt.tokens_of(span), digests.digest(span, first)
                images = request.images_in(span)
                yield WaitingChunk(request.request_id, digest, tokens, context, request.adapter, images)


def _cannot_be_reused(request: Any, adapter: Adapter | None) -> Fallback | None:
    """Why the KV of a request's chunks cannot be taken from the store; ``None`` if it can."""
    if request.lora_request is not None and adapter is None:
        return Fallback.LORA
    if request.prompt_embeds is not None:
        return Fallback.PROMPT_EMBEDS
    if request.pooling_params is not None or request.skip_reading_prefix_cache:
        return Fallback.EVERY_TOKEN_WANTED
    return None
