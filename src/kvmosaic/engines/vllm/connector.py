"""The connector vLLM loads: scheduler side and worker side of the chunk cache."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.engines.vllm.loader import ChunkLoader
from kvmosaic.engines.vllm.scheduler import ChunkLoad, ChunkScheduler
from kvmosaic.engines.vllm.sparse import SparseForward
from kvmosaic.engines.vllm.worker import current_runner

logger = logging.getLogger(__name__)


@dataclass
class ChunkConnectorMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers for one step."""

    loads: list[ChunkLoad] = field(default_factory=list)


class ChunkConnector(KVConnectorBase_V1):
    """Reuses chunks inside vLLM. Loads happen before a request's first forward, in the same step."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config: ChunkCacheConfig = load_config(**vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._caches = kv_cache_config
        self._tokenizer = _tokenizer(vllm_config)
        self._parser = ChunkTokenParser(self._tokenizer, self._config.chunk_separator)
        self.scheduler: ChunkScheduler | None = None
        self.loader: ChunkLoader | None = None
        if role == KVConnectorRole.SCHEDULER:
            block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            self.scheduler = ChunkScheduler(self._config, self._parser, block_size)

    # --- scheduler side

    def on_new_request(self, request: Any) -> None:
        assert self.scheduler is not None
        self.scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        assert self.scheduler is not None
        return self.scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        assert self.scheduler is not None
        return ChunkConnectorMetadata(self.scheduler.take_loads())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        self.scheduler.finished(request)
        return False, None

    # --- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        runner, device_pool = current_runner()
        if runner is None:
            raise ConfigError(
                "the chunk connector needs its worker; start vLLM with "
                "--worker-cls kvmosaic.engines.vllm.worker.ChunkWorker"
            )
        forward = SparseForward(self._vllm_config, runner, self._caches)
        model = self._vllm_config.model_config
        identity = {
            "dtype": str(model.dtype),
            "revision": model.revision,
            "config": model.hf_text_config.to_dict(),
            "weights": _weight_files(model.model),
            "tensor_parallel": (
                self._vllm_config.parallel_config.tensor_parallel_size,
                get_tensor_model_parallel_rank(),
            ),
        }
        self.loader = ChunkLoader(
            self._config, model.model, identity, self._sink(), self._parser, forward, runner.model, device_pool
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ChunkConnectorMetadata)
        if not metadata.loads:
            return
        assert self.loader is not None
        # Without metadata vLLM's per-layer hooks stay quiet while we run forwards of our own.
        self._connector_metadata = None
        try:
            for load in metadata.loads:
                self.loader.load(load)
        finally:
            self._connector_metadata = metadata

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is pending: loads end before the forward starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are stored when they are filled, never from a request's own KV."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: the store writes in the background."""

    def shutdown(self) -> None:
        if self.loader is not None:
            self.loader.cache.close()

    def _sink(self) -> list[int]:
        prefix = self._config.sink_prefix
        if prefix == "none":
            return []
        if prefix == "bos":
            bos = self._vllm_config.model_config.hf_text_config.bos_token_id
            return [] if bos is None else [bos]
        if self._tokenizer is None:
            raise ConfigError(f"sink_prefix={prefix!r}: a text needs a tokenizer; use 'bos' or 'none'")
        return list(self._tokenizer.encode(prefix, add_special_tokens=False))


def _weight_files(model: str) -> list[tuple[str, int, int]]:
    """Name, size and time of a local model's files: new weights in the same folder must get other keys. A hub name
    is told apart by its revision."""
    files = sorted(path for path in Path(model).glob("*") if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _tokenizer(vllm_config: Any) -> Any:
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
