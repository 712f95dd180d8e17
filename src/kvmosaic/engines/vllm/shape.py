"""The sizes of one engine that the scheduler's rules depend on."""

from dataclasses import dataclass
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.window import reachable_tail
from kvmosaic.engines.vllm.compat.cache import block_size, hash_block_size, holds_bytes, sliding_window
from kvmosaic.engines.vllm.support import looks_inside

SEGMENT_TOKENS = 256
"""Approximate number of exact-prefix tokens per entry: large enough for efficient transfers, small enough that little
of a prompt is left over."""
MAX_SEGMENT_TOKENS = 2048
"""Maximum number of tokens of such an entry if it is enlarged so that layers with a sliding window can leave some
out."""


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Sizes of one vLLM engine, in tokens unless said otherwise."""

    block_size: int
    hash_block_size: int
    """Tokens per hash in a request's block hashes."""
    ranks: int
    """Number of ranks, over tensor and pipeline parallelism."""
    step_tokens: int
    """Maximum number of tokens that vLLM computes in a step."""
    max_positions: int
    """Maximum length of a sequence."""
    prefix_cache_tokens: int
    """Capacity of vLLM's own prefix cache; 0 if it is off."""
    num_layers: int
    has_drafts: bool
    """Whether draft tokens are computed, which may be rejected later."""
    segment_tokens: int
    """Number of exact-prefix tokens per entry; a multiple of ``block_size``."""
    window_tail: int | None
    """Number of tokens of an entry that layers with a sliding window keep; ``None``: all."""
    stages: int = 1
    """Number of pipeline stages. As many steps are computed at a time."""
    is_quantised: bool = False
    """Whether vLLM's blocks hold rounded KV."""
    places_sink: bool = False
    """Whether chunks are filled after a learned sink, which is placed and not computed."""
    reads_images: bool = False
    """Whether workers can read images themselves, and not only vLLM."""
    loads_questions: bool = False
    """Whether a load that computes tokens also computes a short question, except its last token. vLLM then computes
    one token of the request, as for requests that decode; whole steps of such tokens are CUDA graphs."""

    @classmethod
    def of(
        cls,
        vllm_config: Any,
        kv_cache_config: Any,
        config: ChunkCacheConfig,
        *,
        places_sink: bool = False,
        reads_images: bool = False,
    ) -> "EngineShape":
        size, window = block_size(kv_cache_config), sliding_window(kv_cache_config)
        has_drafts = vllm_config.speculative_config is not None
        # A draft model begins a token before the boundary, and so a block before it.
        reach = None if window is None else reachable_tail(window, size, int(has_drafts))
        # The name of an entry says nothing of the layers with a window in its stage.
        parallel = vllm_config.parallel_config
        is_one_stage = parallel.pipeline_parallel_size == 1
        cuts = config.window_tails and is_one_stage and not looks_inside(config.policy, config.recompute_ratio)
        caches_prefixes = vllm_config.cache_config.enable_prefix_caching
        return cls(
            block_size=size,
            hash_block_size=hash_block_size(vllm_config, kv_cache_config),
            ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_positions=vllm_config.model_config.max_model_len,
            prefix_cache_tokens=kv_cache_config.num_blocks * size if caches_prefixes else 0,
            num_layers=vllm_config.model_config.hf_text_config.num_hidden_layers,
            has_drafts=has_drafts,
            segment_tokens=-(-segment_tokens(reach) // size) * size,
            window_tail=reach if cuts else None,
            stages=parallel.pipeline_parallel_size,
            is_quantised=holds_bytes(kv_cache_config),
            places_sink=places_sink,
            reads_images=reads_images,
            loads_questions=not has_drafts,  # otherwise vLLM's graphs have several tokens of each request
        )

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks for ``tokens``."""
        return -(-tokens // self.block_size)

    def fill_shares(self, context: int) -> tuple[int, int]:
        """Split ``context`` tokens into those that fill whole blocks, which are computed once for all chunks behind
        them, and the rest, which is computed for each chunk."""
        return context - context % self.block_size, context % self.block_size

    def computed_context(self, context: int) -> int:
        """Number of ``context`` tokens that a fill computes: none of a learned sink, which is placed."""
        return 0 if self.places_sink else context

    def is_cut(self, tokens: int) -> bool:
        """Whether some layers keep only a part of an entry of ``tokens``."""
        return self.window_tail is not None and tokens > self.window_tail


def segment_tokens(reach: int | None) -> int:
    """Number of tokens per segment. Layers with a sliding window need only the last ``reach`` of them, so a segment
    has at least twice as many. If that is too long, segments have the usual size and nothing is left out. The size
    does not depend on whether tokens are really left out, so that lookups find the same segments either way."""
    return SEGMENT_TOKENS if reach is None or 2 * reach > MAX_SEGMENT_TOKENS else max(SEGMENT_TOKENS, 2 * reach)
