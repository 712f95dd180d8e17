"""From the chunk cache's settings to vLLM's own arguments."""

import logging
from copy import deepcopy
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.precision import WHY_FLOAT32, cpu_runs_bfloat16, needs_float32
from kvmosaic.engines.vllm.support import unsupported, version_problem

logger = logging.getLogger(__name__)

WORKER = "kvmosaic.engines.vllm.worker.ChunkWorker"
NO_WORKER = "auto"
"""vLLM's default for ``worker_cls``."""
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


def release_problems(version: str) -> tuple[str | None, list[str]]:
    """Why this release of vLLM, which is the installed one, was not tested, in one line, if so; and the contracts
    that it broke, one line each. Only contracts of untested releases are checked."""
    problem = version_problem(version)
    if problem is None:
        return None, []
    from kvmosaic.engines.vllm.compat.contracts import broken_contracts

    return problem, broken_contracts()


def can_be_used() -> bool:
    """Whether the installed vLLM has what the chunk cache relies on. If an untested release does not, this is logged
    in one line, and vLLM has to be started without the chunk cache."""
    import vllm  # here, because the rest of this module is also used where vLLM is missing or broken

    problem, broken = release_problems(vllm.__version__)
    if broken:
        logger.error(
            "the chunk cache is off, and requests are served by plain vLLM: %s; %s", problem, "; ".join(broken)
        )
    elif problem is not None:
        logger.warning(problem)
    return not broken


def refuse_replaced(asked: Any) -> None:
    """Raise :class:`ConfigError`, with one line, if the user gave arguments that :func:`engine_arguments` would
    replace. ``asked``: vLLM's ``EngineArgs`` or its parsed options, without ours."""
    without = "leave it out, or turn the chunk cache off"
    if asked.kv_transfer_config is not None:
        raise ConfigError(
            f"kv_transfer_config: vLLM has one connector, and with the chunk cache that is kvmosaic's own; {without}"
        )
    if asked.worker_cls not in (NO_WORKER, WORKER):
        name = getattr(asked.worker_cls, "__qualname__", asked.worker_cls)
        raise ConfigError(f"worker_cls={name}: with the chunk cache, vLLM's worker is kvmosaic's own; {without}")


def problems_of(vllm_config: Any) -> list[str]:
    """Why the chunk cache cannot work with this ``VllmConfig``, as far as that is known before an engine starts: one
    line per reason, with what to do about it."""
    from kvmosaic.engines.vllm.compat.cache import unsupported_latent
    from kvmosaic.engines.vllm.setup import settings_with_sink

    problems = [*unsupported(vllm_config), *unsupported_latent(vllm_config)]
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        config = load_config(**transfer.kv_connector_extra_config)
        try:
            settings_with_sink(config, vllm_config.parallel_config.pipeline_parallel_size)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def configuration(engine_args: Any) -> Any:
    """The ``VllmConfig`` of vLLM's ``EngineArgs``, which stay as they are, to look for problems in it."""
    used = deepcopy(engine_args)
    if getattr(used, "kv_offloading_size", None) is not None:
        used.kv_transfer_config = None  # otherwise vLLM looks for its own connector in our module, and fails
    return used.create_engine_config()


def refuse_unsupported(engine_args: Any) -> None:
    """Raise :class:`ConfigError`, with one line, if the chunk cache cannot work with vLLM's ``EngineArgs``. To be
    called before any process is started."""
    problems = problems_of(configuration(engine_args))
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
