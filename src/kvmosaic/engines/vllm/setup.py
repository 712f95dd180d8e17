"""Settings, parser, sink prefix and sizes that both sides of the connector use."""

from dataclasses import dataclass
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.discovery import MIN_RUN, Discovery
from kvmosaic.core.errors import ConfigError, UnsupportedModelError
from kvmosaic.core.learned_sink import LearnedSink
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.profile import is_shipped
from kvmosaic.core.turns import turn_markers
from kvmosaic.engines.identity import learned_sink, sink_of, text_sink
from kvmosaic.engines.vllm.compat.cache import served_cache, unsupported_cache, unsupported_latent
from kvmosaic.engines.vllm.shape import EngineShape
from kvmosaic.engines.vllm.support import images_problem, policy_served, unsupported


@dataclass(frozen=True)
class EngineSetup:
    """Setup of one engine, the same in the scheduler's process and in the workers' processes."""

    config: ChunkCacheConfig
    parser: ChunkTokenParser
    learned: LearnedSink | None
    """Learned sink that chunks are placed behind, if there is one. Read once, because its file may be replaced."""
    sink: tuple[int, ...]
    """Tokens that chunks are computed after, or placeholders for the tokens of a learned sink."""
    shape: EngineShape
    engine_id: str
    markers: frozenset[int]
    """Ids of the tokens between the turns of a conversation."""
    draft_sink: tuple[int, ...] = ()
    """Text that a draft model gets as sink prefix where the model has a learned one."""

    def discovery(self) -> Discovery | None:
        """A :class:`Discovery` for chunks that requests do not name, if the settings ask for it."""
        if "auto" not in self.config.sources:
            return None
        return Discovery(self.markers, self.shape.prefix_cache_tokens, max(MIN_RUN, self.config.min_chunk_tokens))

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> "EngineSetup":
        """Raises :class:`UnsupportedModelError` or :class:`ConfigError`, with one line, where chunks cannot work."""
        problems = (
            unsupported(vllm_config)
            or unsupported_latent(vllm_config)
            or unsupported_cache(vllm_config, kv_cache_config)
        )
        if problems:
            raise UnsupportedModelError(f"the chunk cache cannot be used here: {problems[0]}")
        model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
        # Our front ends give all settings; the profile is for a plain ``vllm serve``.
        config = load_config(model.model, **transfer.kv_connector_extra_config)
        try:
            stages = vllm_config.parallel_config.pipeline_parallel_size
            policy_served(config.policy, model.hf_text_config.num_hidden_layers, stages)
        except ConfigError as error:
            raise config.blame(error) from None
        config, learned = settings_with_sink(config, vllm_config.parallel_config.pipeline_parallel_size)
        reads_images = model.is_multimodal_model and images_problem(vllm_config) is None
        caches = served_cache(vllm_config, kv_cache_config)
        shape = EngineShape.of(
            vllm_config, caches, config, places_sink=learned is not None, reads_images=reads_images
        )
        tokenizer = load_tokenizer(model)
        return cls(
            config,
            ChunkTokenParser(tokenizer, config.chunk_separator, config.min_chunk_tokens),
            learned,
            sink_of(config, learned, model.hf_text_config.bos_token_id, tokenizer),
            shape,
            transfer.engine_id,
            turn_markers(tokenizer),
            text_sink(config, model.hf_text_config.bos_token_id, tokenizer) if learned and shape.has_drafts else (),
        )


def settings_with_sink(config: ChunkCacheConfig, stages: int) -> tuple[ChunkCacheConfig, LearnedSink | None]:
    """The settings that an engine of so many pipeline stages uses, and its learned sink, if there is one. Raises
    :class:`ConfigError`, with one line, if the sink cannot be used."""
    has_stages = stages > 1
    if has_stages and is_shipped(config.sink_prefix):  # a default, not the user's choice
        config = config.model_copy(update={"sink_prefix": "document"})
    learned = learned_sink(config)
    if not has_stages:
        return config, learned
    if learned is not None:
        raise config.blame(
            ConfigError("a learned sink does not work with pipeline_parallel_size > 1; choose another sink_prefix"),
            "sink_prefix",
        )
    # Keys of pipeline stages name their layers. Such keys stand for heads that are stored separately.
    return config.model_copy(update={"per_head_storage": True}), None


def load_tokenizer(model: Any) -> Any:
    """The tokenizer of vLLM's ``ModelConfig``; ``None`` if vLLM is configured to load none."""
    if model.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
