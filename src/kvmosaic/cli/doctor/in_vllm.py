"""Checks of a model in vLLM, with the options that ``kvmosaic serve`` would get. No engine starts."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kvmosaic.cli.doctor.row import Row, reason
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.precision import WHY_FLOAT32
from kvmosaic.engines.vllm.support import QUANTISED, cache_dtype, images_problem


@dataclass(frozen=True)
class Served:
    """A model as vLLM would serve it."""

    ranks: int
    """Tensor-parallel size."""
    stages: int
    """Pipeline-parallel size."""
    engines: int = 1
    """Data-parallel size."""
    config: Any = None
    """vLLM's ``VllmConfig``; ``None`` without vLLM, or if vLLM refuses the model."""
    rows: tuple[Row, ...] = ()

    @property
    def processes(self) -> int:
        return self.ranks * self.stages * self.engines


def served(source: str, settings: ChunkCacheConfig, options: Sequence[str], sizes: Served) -> Served:
    """A model with these options of ``kvmosaic serve``. ``sizes`` are those that were given as options of the doctor
    itself, which need no vLLM."""
    if find_spec("vllm") is None:  # the row about vLLM itself says how to install it
        rows = [Row("options", "warn", " ".join(options), "only vLLM can check them, and it is missing")]
        return sizes if not options else Served(sizes.ranks, sizes.stages, rows=tuple(rows))
    try:
        return _tried(source, settings, _with_sizes(options, sizes))
    except ConfigError as error:
        return Served(sizes.ranks, sizes.stages, rows=(Row("options", "fail", "refused at start", reason(error)),))
    except Exception as error:  # vLLM's modules fail in many ways if its build does not match the machine
        return Served(sizes.ranks, sizes.stages, rows=(Row("model in vLLM", "fail", "not checked", reason(error)),))


def _with_sizes(options: Sequence[str], sizes: Served) -> list[str]:
    own = {"--tensor-parallel-size": sizes.ranks, "--pipeline-parallel-size": sizes.stages}
    return [*(text for name, size in own.items() if size > 1 for text in (name, str(size))), *options]


def _tried(source: str, settings: ChunkCacheConfig, options: Sequence[str]) -> Served:
    from kvmosaic.cli.doctor.features import Trial
    from kvmosaic.engines.vllm.arguments import served_dtype
    from kvmosaic.engines.vllm.command_line import server_options
    from kvmosaic.engines.vllm.compat.server import ServeCommand

    command, ours = ServeCommand(), sys.argv
    try:
        args = command.engine_args(server_options(command, source, options, settings))
    finally:
        sys.argv = ours
    trial = Trial(args)
    rows = [*trial.problems(), *trial.features()]
    if trial.error is not None:
        found = "refused at start" if isinstance(trial.error, ConfigError) else "vLLM refuses it"
        rows.insert(0, Row("model in vLLM", "fail", found, reason(trial.error)))
    elif not any(row.check == "model in vLLM" for row in rows):
        why = "" if served_dtype(args) == args.dtype else f": {WHY_FLOAT32}"
        rows = [_runs(trial.config, why), *_images(trial.config, settings), *rows]
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
    return Served(*sizes, trial.config, tuple(rows))


def _runs(config: Any, why: str) -> Row:
    dtype, cached = dtype_name(config.model_config.dtype), cache_dtype(config)
    rounded = f"; KV cache in {cached}, documents in {dtype}" if cached in QUANTISED else ""
    return Row("model in vLLM", "ok", f"runs in {dtype}{why}{rounded}")


def _images(vllm_config: Any, settings: ChunkCacheConfig) -> Iterator[Row]:
    """Row about a multimodal model's images."""
    if not vllm_config.model_config.is_multimodal_model:
        return
    problem = images_problem(vllm_config)
    if problem is not None:
        yield Row("images", "warn", "documents before them are reused", problem)
    elif "images" in settings.sources:
        yield Row("images", "ok", "reused, and so are documents beside them")
    else:
        yield Row("images", "ok", "documents beside them are reused; images too, if chunk_sources has images")


def dtype_name(dtype: object) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
