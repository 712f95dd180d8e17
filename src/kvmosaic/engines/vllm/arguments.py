"""From the chunk cache's settings to vLLM's own arguments."""

import logging
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.precision import WHY_FLOAT32, cpu_runs_bfloat16, needs_float32
from kvmosaic.engines.vllm.support import unsupported, version_problem

logger = logging.getLogger(__name__)

WORKER = "kvmosaic.engines.vllm.worker.ChunkWorker"
CONNECTOR_MODULE = "kvmosaic.engines.vllm.connector"
CONNECTOR = "ChunkConnector"
MIDDLEWARE = "kvmosaic.vllm.ChunkMiddleware"


def engine_arguments(config: ChunkCacheConfig) -> dict[str, Any]:
    """``worker_cls`` and ``kv_transfer_config`` for ``vllm.LLM`` or, as JSON, for ``vllm serve``."""
    return {
        "worker_cls": WORKER,
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": config.model_dump(mode="json"),
        },
    }


def can_be_used() -> bool:
    """Whether the installed vLLM has what the chunk cache relies on. If an untested release does not, this is logged
    in one line, and vLLM has to be started without the chunk cache."""
    import vllm  # here, because the rest of this module is also used where vLLM is missing or broken

    problem = version_problem(vllm.__version__)
    if problem is None:
        return True
    from kvmosaic.engines.vllm.compat.contracts import broken_contracts

    broken = broken_contracts()
    if broken:
        logger.error(
            "the chunk cache is off, and requests are served by plain vLLM: %s; %s", problem, "; ".join(broken)
        )
    else:
        logger.warning(problem)
    return not broken


def refuse_unsupported(engine_args: Any) -> None:
    """Raise :class:`ConfigError`, with one line, if the chunk cache cannot work with vLLM's ``EngineArgs``. To be
    called before any process is started."""
    problems = unsupported(engine_args.create_engine_config())
    if problems:
        raise ConfigError(f"the chunk cache cannot be used here: {'; '.join(problems)}")


def served_dtype(engine_args: Any) -> Any:
    """The ``dtype`` to give vLLM instead of the one in its ``EngineArgs``.

    It is float32 if "auto" would choose a dtype that this CPU cannot run; this is logged. An explicit bfloat16 is
    refused on such a CPU.
    """
    from vllm.platforms import current_platform

    asked = engine_args.dtype
    if not current_platform.is_cpu() or cpu_runs_bfloat16():
        return asked
    if _name(asked) == "bfloat16":
        raise ConfigError(f"dtype=bfloat16: {WHY_FLOAT32}; use float32 or leave dtype at auto")
    if asked != "auto":
        return asked
    model = engine_args.create_model_config()
    chosen = _name(model.dtype)
    if not needs_float32(chosen, model.quantization is not None):
        return asked
    logger.warning("serving in float32 instead of %s: %s", chosen, WHY_FLOAT32)
    return "float32"


def _name(dtype: object) -> str:
    """The dtype's name without ``torch.``: ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
