"""Checks of this machine: kvmosaic itself, torch, an accelerator, the two engines."""

import platform
import subprocess
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import kvmosaic
from kvmosaic.cli.doctor.row import GIB, Row, reason
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.precision import WHY_FLOAT32, cpu_runs_bfloat16
from kvmosaic.engines.vllm.arguments import release_problems
from kvmosaic.engines.vllm.support import ASCEND_UNTRIED, version_problem


def kvmosaic_itself() -> Iterator[Row]:
    commit = _commit(Path(kvmosaic.__file__).parents[2])
    yield Row("kvmosaic", "ok", f"{kvmosaic.__version__}, commit {commit}" if commit else kvmosaic.__version__)


def _commit(clone: Path) -> str:
    """The commit of a clone; empty if it is no clone, or git cannot tell."""
    if not (clone / ".git").exists():
        return ""
    command = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def runtime() -> Iterator[Row]:
    import torch

    verdict: Literal["ok", "fail"] = "ok" if _release(torch.__version__) >= (2, 6) else "fail"
    advice = "" if verdict == "ok" else "pip install 'torch>=2.6'"
    yield Row("Python, torch", verdict, f"{platform.python_version()}, {torch.__version__}", advice)


def accelerator(settings: ChunkCacheConfig) -> Iterator[Row]:
    import torch

    from kvmosaic.core.accelerator import accelerator_there

    module, gpu = accelerator_there(), torch.cuda.is_available()
    if module is not None:
        name, count = module.get_device_name(), module.device_count()
        total = module.get_device_properties(0).total_memory
        share = settings.chunk_cache_gpu_memory_fraction
        pool = f"{share:.0%} device pool: {device_pool(settings) / GIB:.1f} GiB"
        yield Row("accelerator", "ok", f"{count} x {name}, {total / GIB:.1f} GiB; {pool}")
    else:
        yield Row("accelerator", "ok", "none, CPU only; no device pool")
        if not cpu_runs_bfloat16():
            yield Row("precision", "ok", f"float32: {WHY_FLOAT32}")
    try:
        yield Row("Triton", "ok", import_module("triton").__version__)
    except ImportError as error:
        missing = f"kernels on the GPU need Triton ({reason(error)}); pip install triton"
        found = "cannot be imported" if gpu else "absent; only needed with a GPU"
        yield Row("Triton", "fail" if gpu else "ok", found, missing if gpu else "")


def device_pool(settings: ChunkCacheConfig) -> int:
    """Size of the device tier on an accelerator, in bytes; 0 without one."""
    from kvmosaic.core.accelerator import accelerator_there

    module = accelerator_there()
    if module is None:
        return 0
    return int(module.get_device_properties(0).total_memory * settings.chunk_cache_gpu_memory_fraction)


def embedded_engine() -> Iterator[Row]:
    try:
        import_module("kvmosaic.hf")
    except ImportError as error:
        advice = f"it cannot be imported ({reason(error)}); in a clone of kvmosaic: pip install -e '.[hf]'"
        # With vLLM installed, there is still one engine; without it there is none.
        yield Row("embedded engine", "warn" if find_spec("vllm") else "fail", "not available", advice)
        return
    version = metadata.version("transformers")
    tried = (5, 17) <= _release(version) < (6, 0)
    advice = "" if tried else "this release of transformers was never tested; pip install 'transformers>=5.17,<6'"
    yield Row("embedded engine", "ok" if tried else "warn", f"transformers {version}", advice)


def vllm() -> Iterator[Row]:
    if find_spec("vllm") is None:
        from kvmosaic.core.accelerator import accelerator_there

        on_cpu = "make .venv-vllm/.serve, then use .venv-vllm/bin/kvmosaic"
        how = on_cpu if accelerator_there() is None else "pip install -e '.[vllm]'"
        advice = f"only the embedded engine works; for serving, in a clone of kvmosaic: {how}"
        yield Row("vLLM", "warn", "not installed", advice)
        return
    yield _release_row(_vllm_version())
    from kvmosaic.engines.vllm.arguments import CONNECTOR_MODULE, WORKER

    for check, qualified in (("vLLM connector", f"{CONNECTOR_MODULE}.ChunkConnector"), ("vLLM worker", WORKER)):
        module, _, name = qualified.rpartition(".")
        try:
            base = getattr(import_module(module), name).__mro__[1]
            yield Row(check, "ok", f"{name}, a {base.__name__}")
        except Exception as error:  # vLLM's modules fail in many ways if its build does not match the machine
            yield Row(check, "fail", "cannot be imported", f"{reason(error)}; reinstall vLLM for this machine")


def _release_row(version: str) -> Row:
    """Row about the release, as an engine judges it at start: the chunk cache is used in an untested one, unless it
    broke something."""
    try:
        problem, broken = release_problems(version)
    except Exception as error:  # vLLM's modules fail in many ways if its build does not match the machine
        problem, broken = version_problem(version), [reason(error)]
    if broken:
        return Row("vLLM", "fail", version, f"the chunk cache would be off: {problem}; {'; '.join(broken)}")
    if problem == ASCEND_UNTRIED:
        version = f"{version}, with vllm-ascend"
    return Row("vLLM", "ok" if problem is None else "warn", version, problem or "")


def _vllm_version() -> str:
    """The version of vLLM, whose distributions have different names on different machines."""
    names = metadata.packages_distributions().get("vllm")
    return metadata.version(names[0]) if names else import_module("vllm").__version__


def _release(version: str) -> tuple[int, ...]:
    """``(2, 13)`` of ``2.13.0+cpu``."""
    return tuple(int(part) for part in version.split(".")[:2])
