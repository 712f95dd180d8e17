"""From the chunk cache's settings to vLLM's own arguments."""

from typing import Any

from kvmosaic.core.config import ChunkCacheConfig

WORKER = "kvmosaic.engines.vllm.worker.ChunkWorker"
CONNECTOR_MODULE = "kvmosaic.engines.vllm.connector"


def engine_arguments(config: ChunkCacheConfig) -> dict[str, Any]:
    """``worker_cls`` and ``kv_transfer_config`` for ``vllm.LLM`` or, as JSON, for ``vllm serve``."""
    return {
        "worker_cls": WORKER,
        "kv_transfer_config": {
            "kv_connector": "ChunkConnector",
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": config.model_dump(mode="json"),
        },
    }
