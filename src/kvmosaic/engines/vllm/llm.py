"""``vllm.LLM`` with a chunk cache."""

from dataclasses import fields
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs

from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.arguments import engine_arguments, refuse_unsupported, served_dtype
from kvmosaic.models import resolve


class LLM(vllm.LLM):  # type: ignore[misc]
    """``vllm.LLM`` plus the keywords of :class:`ChunkCacheConfig`; everything else is vLLM's."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        settings = {name: kwargs.pop(name) for name in ChunkCacheConfig.model_fields if name in kwargs}
        self.chunk_cache_config = load_config(model, **settings)
        model = resolve(model)
        known = {field.name for field in fields(EngineArgs)}
        arguments = EngineArgs(model=model, **{name: kwargs[name] for name in kwargs.keys() & known})
        arguments.dtype = kwargs["dtype"] = served_dtype(arguments)
        if self.chunk_cache_config.enable_chunk_cache:
            refuse_unsupported(arguments)
            kwargs |= engine_arguments(self.chunk_cache_config)
        super().__init__(model=model, **kwargs)

    def get_stats(self) -> dict[str, Any]:
        """Statistics of the first worker's chunk cache: ``hit_rate, total_chunks, current_memory_mb, …``."""
        if not self.chunk_cache_config.enable_chunk_cache:
            raise ConfigError("the chunk cache is off; pass enable_chunk_cache=True")
        return self.collective_rpc("chunk_cache_stats")[0]
