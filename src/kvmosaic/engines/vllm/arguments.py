"""From the chunk cache's settings to vLLM's own arguments."""

import logging
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.support import unsupported, version_problem

logger = logging.getLogger(__name__)

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
            "kv_connector_extra_config": config.model_dump(mode="json"),
        },
    }


def refuse_unsupported(engine_args: Any) -> None:
    """Say in one line why the chunk cache cannot work with vLLM's ``EngineArgs``, before any process is started."""
    import vllm  # here, as the rest of this module is also wanted where vLLM is missing or broken

    problem = version_problem(vllm.__version__)
    if problem is not None:
        logger.warning(problem)
    problems = unsupported(engine_args.create_engine_config())
    if problems:
        raise ConfigError(f"the chunk cache cannot be used here: {'; '.join(problems)}")
