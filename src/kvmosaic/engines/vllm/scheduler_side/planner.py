"""Reads requests: which have chunks, and what is to be done with them."""

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.blend import policy_named
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.key import content_hash
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.vllm.parameters import RequestParameters, looks_inside, policy_served

logger = logging.getLogger(__name__)


@dataclass
class Plan:
    """A request with chunks, while it waits or runs."""

    prompt: ChunkedPrompt
    ratio: float
    policy: str
    digests: tuple[bytes, ...]
    """Content hash of each chunk."""
    fetched_from: dict[bytes, str] = field(default_factory=dict)
    """Chunks that came from slower tiers."""
    asked_for: list[bytes] = field(default_factory=list)
    """Chunks that nobody here knows and the remote tier was asked for."""
    predicted: float | None = None
    """Seconds that bringing its chunks will take, where that was asked and costs were measured."""
    is_worth_it: bool = False
    """Whether that was found to be faster than a plain prefill, since it last asked for blocks."""
    waiting_for: set[int] | None = None
    """Ranks that have yet to fetch its chunks; ``None`` before anybody was asked to."""
    deadline: float | None = None
    """When to stop waiting."""
    at_once: int | None = None
    """Tokens to compute in the step in which it gets its blocks, if it is to be loaded in slices."""
    is_in_slices: bool = False
    """Whether it got its blocks so, and will get some more when all slices are done."""
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def is_probed(self) -> bool:
        """Whether choosing what is recomputed takes a look at the prompt's KV."""
        return 0 < self.ratio < 1 and policy_named(self.policy).reads_content

    def salt(self) -> bytes:
        """Everything that the KV of chunks depends on besides the tokens up to there."""
        text = repr((self.ratio, self.prompt.chunks))
        if 0 < self.ratio < 1:
            text += repr(self.policy)
        # What is recomputed depends on the policy and, with most, on all of the prompt.
        return text.encode() + (self.prompt.words.tobytes() if self.is_probed else b"")


class Planner:
    """Makes plans, or says why a request gets none."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        parser: ChunkTokenParser,
        sink: tuple[int, ...],
        num_layers: int,
        tail: int | None,
    ) -> None:
        """``tail``: so many tokens of a chunk are kept in layers with a sliding window; ``None``: all."""
        self._config = config
        self._tail = tail
        self._parser = parser
        self._sink = sink
        self._num_layers = num_layers

    def context(self, prompt: ChunkedPrompt) -> tuple[int, ...]:
        """What the chunks of a prompt are computed after."""
        return prompt.tokens_of(prompt.system) if self._config.chunk_context == "system" else self._sink

    def is_cut(self, tokens: int) -> bool:
        """Whether an entry of so many tokens does not keep all of them in all layers."""
        return self._tail is not None and tokens > self._tail

    def plan(self, request: Any) -> Plan | str | None:
        """A plan for a request with chunks, the reason why it gets none, or ``None`` when it has no chunks."""
        if not request.prompt_token_ids:
            return None
        try:
            params = RequestParameters.of(request)
            if not params.chunk_cache:
                return None
            prompt = self._parser.parse(request.prompt_token_ids, params.boundaries)
            ratio = self._config.recompute_ratio if params.recompute_ratio is None else float(params.recompute_ratio)
            policy = self._config.policy if params.policy is None else params.policy
            policy_served(policy, self._num_layers)
        except KvmosaicError as error:
            logger.warning("request %s is served without the chunk cache: %s", request.request_id, error)
            return "bad-parameters"
        if not prompt.chunks:
            return None
        if request.lora_request is not None:
            return "lora"  # KV would depend on the adapter
        if request.prompt_embeds is not None:
            return "prompt-embeds"
        if request.mm_features:
            return "multimodal"  # image tokens say nothing about the image
        if request.pooling_params is not None or request.skip_reading_prefix_cache:
            return "every-token-wanted"  # prompt logprobs and pooling need hidden states that reuse does not compute
        context, algorithm = self.context(prompt), self._config.chunk_hash_algorithm
        words = prompt.words
        digests = tuple(content_hash(words[span.start : span.end], context, algorithm) for span in prompt.chunks)
        if request.cache_salt is not None:
            # Who asks to be kept apart from others in vLLM's prefix cache is kept apart here.
            salt = request.cache_salt.encode()
            digests = tuple(hashlib.sha256(salt + digest).digest()[: len(digest)] for digest in digests)
        if sum(map(len, prompt.chunks)) < self._config.blend_min_tokens:
            return "few-tokens"
        if looks_inside(policy, ratio) and any(self.is_cut(len(span)) for span in prompt.chunks):
            logger.warning(
                "request %s is prefilled: %s at ratio %g looks inside chunks, of which layers with a sliding window "
                "keep only the last %d tokens; start the engine with that ratio, or with window_tails=false",
                *(request.request_id, policy, ratio, self._tail),
            )
            return "window"
        return Plan(prompt, ratio, policy, digests)
