"""``kvmosaic doctor``: whether this machine, these settings and a model work together, before anything is started."""

import logging
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from pydantic import ValidationError
from rich.markup import escape

from kvmosaic.cli.output import JsonOption, console, print_json, print_line, print_table
from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.engines.vllm.support import unsupported, version_problem

if TYPE_CHECKING:  # importing it for real takes seconds, which `kvmosaic --help` should not
    import torch

GIB = 2**30
MOVABLE_ROPE = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope", "proportional"})
"""Rotary tables whose keys can be turned from one position to another."""
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
STATE_LAYERS = frozenset({"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"})
"""Kinds of layers, in transformers' words, that carry a state from token to token."""


class Row(NamedTuple):
    """One line of the report."""

    check: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    """What is wrong and what to do about it."""


def doctor(
    model: Annotated[str | None, typer.Argument(help="Catalog name, folder or hub name; never downloaded.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share the model in vLLM.")] = 1,
    json: JsonOption = False,
) -> None:
    """Check this machine, the settings and a model. Exit status 1 if something will not work."""
    with _quiet_and_offline(), console.status("checking"):
        rows = list(_checks(model, tensor_parallel_size))
    count = Counter(row.verdict for row in rows)
    title = f"{len(rows)} checks: {count['ok']} ok, {count['warn']} warn, {count['fail']} fail"
    shown = ((row.check, row.verdict, escape(row.found)) for row in rows)
    print_table(title, ("check", "verdict", "found"), shown, json=json)
    for row in rows:
        if row.advice:  # below the table, whose cells do not wrap
            print_line(f"{row.verdict}: {row.check}: {row.advice}", json)
    if json:
        print_json({"ok": not count["fail"], "checks": [row._asdict() for row in rows]})
    if count["fail"]:
        raise typer.Exit(1)


@contextmanager
def _quiet_and_offline() -> Iterator[None]:
    """Libraries talk while they are imported, also on stdout, and would ask a model hub for what is not here."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable()
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _checks(model: str | None, processes: int) -> Iterator[Row]:
    settings, row = _load_settings()
    yield from _guard("Python, torch", _runtime())
    yield from _guard("accelerator", _accelerator(settings))
    yield from _guard("embedded engine", _embedded_engine())
    yield from _guard("vLLM", _vllm())
    yield row
    yield from _guard("host memory", _host_memory(settings, processes))
    yield from _guard("disk tier", _disk_tier(settings, processes))
    if model is not None:
        yield from _guard("model", _model(model, settings, processes))


def _guard(check: str, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of a check; whatever goes wrong in it becomes one that fails."""
    try:
        yield from rows
    except Exception as error:
        yield Row(check, "fail", type(error).__name__, _reason(error))


def _reason(error: Exception) -> str:
    """What an error says, in one line: mostly the last, which in pydantic's is a link to its documentation."""
    if isinstance(error, ValidationError):
        messages = (item["msg"] for item in error.errors(include_url=False, include_context=False))
        return "; ".join(" ".join(message.removeprefix("Value error, ").split()) for message in messages)
    lines = str(error).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), type(error).__name__)


# --- the machine


def _runtime() -> Iterator[Row]:
    import torch

    verdict: Literal["ok", "fail"] = "ok" if _release(torch.__version__) >= (2, 6) else "fail"
    advice = "" if verdict == "ok" else "pip install 'torch>=2.6'"
    yield Row("Python, torch", verdict, f"{platform.python_version()}, {torch.__version__}", advice)


def _accelerator(settings: ChunkCacheConfig) -> Iterator[Row]:
    import torch

    gpu = torch.cuda.is_available()
    if gpu:
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        total = torch.cuda.get_device_properties(0).total_memory
        share = settings.chunk_cache_gpu_memory_fraction
        pool = f"{share:.0%} device pool: {_device_pool(settings) / GIB:.1f} GiB"
        yield Row("accelerator", "ok", f"{count} x {name}, {total / GIB:.1f} GiB; {pool}")
    else:
        yield Row("accelerator", "ok", "none, CPU only; no device pool")
    try:
        yield Row("Triton", "ok", import_module("triton").__version__)
    except ImportError as error:
        missing = f"the GPU's kernels need it ({_reason(error)}); pip install triton"
        found = "cannot be imported" if gpu else "absent; only needed with a GPU"
        yield Row("Triton", "fail" if gpu else "ok", found, missing if gpu else "")


def _device_pool(settings: ChunkCacheConfig) -> int:
    """Bytes that the device tier would take of a GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory * settings.chunk_cache_gpu_memory_fraction)


def _embedded_engine() -> Iterator[Row]:
    try:
        import_module("kvmosaic.hf")
    except ImportError as error:
        advice = f"it cannot be imported ({_reason(error)}); pip install 'kvmosaic[hf]'"
        # With vLLM the other engine is still there; without either there is none.
        yield Row("embedded engine", "warn" if find_spec("vllm") else "fail", "not available", advice)
        return
    version = metadata.version("transformers")
    tried = (5, 17) <= _release(version) < (6, 0)
    advice = "" if tried else "this release was never tried; pip install 'transformers>=5.17,<6'"
    yield Row("embedded engine", "ok" if tried else "warn", f"transformers {version}", advice)


def _vllm() -> Iterator[Row]:
    if find_spec("vllm") is None:
        advice = "only the embedded engine works; for serving, pip install 'kvmosaic[vllm]'"
        yield Row("vLLM", "warn", "not installed", advice)
        return
    version = _vllm_version()
    problem = version_problem(version)
    yield Row("vLLM", "fail" if problem else "ok", version, problem or "")
    from kvmosaic.engines.vllm.arguments import CONNECTOR_MODULE, WORKER

    for check, qualified in (("vLLM connector", f"{CONNECTOR_MODULE}.ChunkConnector"), ("vLLM worker", WORKER)):
        module, _, name = qualified.rpartition(".")
        try:
            base = getattr(import_module(module), name).__mro__[1]
            yield Row(check, "ok", f"{name}, a {base.__name__}")
        except Exception as error:  # vLLM's modules fail in many ways where its build and the machine do not match
            yield Row(check, "fail", "cannot be imported", f"{_reason(error)}; reinstall vLLM for this machine")


def _vllm_version() -> str:
    """The version of vLLM, whose distributions have different names on different machines."""
    names = metadata.packages_distributions().get("vllm")
    return metadata.version(names[0]) if names else import_module("vllm").__version__


def _release(version: str) -> tuple[int, ...]:
    """``(2, 13)`` of ``2.13.0+cpu``."""
    return tuple(int(part) for part in version.split(".")[:2])


# --- the settings


def _load_settings() -> tuple[ChunkCacheConfig, Row]:
    try:
        settings = load_config()
    except Exception as error:  # also a YAML file that cannot be read
        return ChunkCacheConfig.model_construct(), Row(
            "settings", "fail", "invalid; assuming defaults", _reason(error)
        )
    changed = [f"{name}={value}" for name, value in settings.model_dump(mode="json", exclude_defaults=True).items()]
    return settings, Row("settings", "ok", ", ".join(changed) or "all at their defaults")


def _host_memory(settings: ChunkCacheConfig, processes: int) -> Iterator[Row]:
    wanted, available = settings.host_memory * processes, _available_memory()
    if available is None:
        yield Row("host memory", "ok", f"{wanted / GIB:.1f} GiB; how much is free is not known on this system")
        return
    found = f"{wanted / GIB:.1f} of {available / GIB:.1f} GiB available"
    if wanted <= available:
        yield Row("host memory", "ok", found)
    else:
        most = int(available / processes / 2 / 2**20)
        yield Row("host memory", "warn", found, f"there is not that much; set host_memory to {most}MiB or less")


def _available_memory() -> int | None:
    """Bytes a process can still get, at most a container's limit; ``None`` where Linux's files are missing."""
    known = []
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        known.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024)
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" is no number, and no limit
            known.append(int(Path("/sys/fs/cgroup", limit).read_text()))
    return min(known, default=None)


def _disk_tier(settings: ChunkCacheConfig, processes: int) -> Iterator[Row]:
    if settings.disk_path is None:
        yield Row("disk tier", "ok", "none; disk_path is not set")
        return
    path = settings.disk_path.expanduser().absolute()
    # Nothing is created: a directory that is not there yet is judged by the one it would be made in.
    existing = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Row("disk tier", "fail", str(path), f"cannot write there ({error.strerror}); choose another disk_path")
        return
    held = 0
    for file in path.rglob("*.safetensors"):
        with suppress(FileNotFoundError):  # another process may be evicting
            held += file.stat().st_size
    free = shutil.disk_usage(existing).free
    found = f"{held / GIB:.1f} of {settings.disk_space * processes / GIB:.1f} GiB used, {free / GIB:.1f} GiB free"
    if held + free >= settings.disk_space * processes:
        yield Row("disk tier", "ok", found)
    else:
        most = int((held + free) / processes / 2**20)
        yield Row("disk tier", "warn", found, f"the disk would be full first; set disk_space to {most}MiB or less")


# --- the model


def _model(name: str, settings: ChunkCacheConfig, processes: int) -> Iterator[Row]:
    source = _find(name)
    if isinstance(source, Row):
        yield source
        return
    vllm_config, vllm_rows = _in_vllm(source, settings, processes)
    yield from _guard("model", _describe(source, vllm_config, settings, processes))
    yield from vllm_rows


def _find(name: str) -> str | Row:
    """What to give a model loader, as :func:`kvmosaic.models.resolve` would, if it is on this machine."""
    from kvmosaic.models import CATALOG, installed

    if name in CATALOG:
        folder = installed().get(name)
        pull = f"kvmosaic models pull {name}, then run this again"
        return str(folder) if folder else Row("model", "warn", "not on this machine, not checked", pull)
    if Path(name).is_dir():
        return name
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return name
    except HFValidationError:
        return Row("model", "fail", "no such folder", f"{name} is neither a folder nor a hub name; correct it")
    fetch = f"{name} is neither a folder nor in the hub's cache; hf download {name}, then run this again"
    return Row("model", "warn", "not on this machine, not checked", fetch)


def _in_vllm(source: str, settings: ChunkCacheConfig, processes: int) -> tuple[Any, list[Row]]:
    """The configuration that vLLM makes of ``kvmosaic serve``'s arguments, and our verdict; no engine starts."""
    if find_spec("vllm") is None:
        return None, []  # said once, of vLLM itself
    from kvmosaic.engines.vllm.arguments import engine_arguments

    arguments = engine_arguments(settings.model_copy(update={"enable_chunk_cache": True}))
    try:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs

        arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        config = EngineArgs(model=source, tensor_parallel_size=processes, **arguments).create_engine_config()
    except Exception as error:
        return None, [Row("model in vLLM", "fail", "vLLM refuses it", _reason(error))]
    problems = [Row("model in vLLM", "fail", "not supported", problem) for problem in unsupported(config)]
    return config, problems or [Row("model in vLLM", "ok", f"runs in {_name(config.model_config.dtype)}")]


def _describe(source: str, vllm_config: Any, settings: ChunkCacheConfig, processes: int) -> Iterator[Row]:
    """What the model's own configuration says."""
    from transformers import AutoConfig

    try:
        # Not to trust is said explicitly: left open, a model that brings its own code makes transformers ask for it.
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Of transformers' errors the first line says what is wrong; the last may be general advice.
        yield Row("model", "fail", "transformers cannot read its configuration", str(error).split("\n")[0])
        return
    text = config.get_text_config(decoder=True)
    architecture = (config.architectures or [config.model_type])[0]
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        advice = "there is no KV to reuse; use a model with attention in every layer"
        yield Row("model", "fail", f"{architecture}, no attention", advice)
        return
    latent = getattr(text, "kv_lora_rank", None)
    kv_heads = _kv_heads(text)
    k_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    v_dim = getattr(text, "v_head_dim", None) or k_dim
    if latent:
        kv_heads, k_dim, v_dim = 1, latent, text.qk_rope_head_dim
    shape = f"one latent of {k_dim} + {v_dim} (MLA)" if latent else f"{kv_heads} KV heads of {k_dim}"
    yield Row("model", "ok", f"{architecture}, {text.num_hidden_layers} layers, {shape}")
    if latent:
        advice = "the vLLM engine does not support MLA yet; use the embedded engine (kvmosaic.hf)"
        yield Row("latent attention", "warn", "embedded engine only", advice)
    elif processes > 1:
        yield _tensor_parallel(kv_heads, processes)
    yield _positions(config, text)
    yield from _layer_kinds(text)

    from kvmosaic.core.entry import KVFormat

    own_heads = -(-kv_heads // processes)
    # Some models share KV between layers, or have heads of two sizes; their configurations say it in many ways.
    odd = ("num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads")
    about = "about " if any(getattr(text, name, None) for name in odd) else ""
    places = [("device pool", _device_pool(settings)), ("host", int(settings.host_memory))]
    for dtype in _dtypes(config, text, vllm_config):
        size = KVFormat(text.num_hidden_layers, own_heads, k_dim, v_dim, dtype).bytes_per_token
        room = ", ".join(f"{place} {budget // size:,}" for place, budget in places if budget)
        share = " on each rank" if own_heads < kv_heads else ""
        yield Row(f"KV in {_name(dtype)}", "ok", f"{about}{size / 1024:.1f} KiB a token{share}; tokens: {room}")


def _kv_heads(text: Any) -> int:
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1  # Falcon's way to say it, whatever its num_kv_heads
    return (
        getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or text.num_attention_heads
    )


def _dtypes(config: Any, text: Any, vllm_config: Any) -> list["torch.dtype"]:
    """The checkpoint's dtype, which the embedded engine keeps, and vLLM's, which may choose another."""
    import torch

    own = config.dtype or text.dtype or torch.float32
    chosen = [getattr(torch, _name(own))]
    if vllm_config is not None:
        chosen.append(vllm_config.model_config.dtype)
    return list(dict.fromkeys(chosen))


def _name(dtype: object) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _tensor_parallel(kv_heads: int, size: int) -> Row:
    if kv_heads % size == 0:
        return Row("tensor parallel", "ok", f"{size} ranks with {kv_heads // size} KV heads each")
    if size % kv_heads == 0:
        return Row("tensor parallel", "ok", f"{size} ranks, each KV head on {size // kv_heads} of them")
    fitting = ", ".join(str(count) for count in range(2, kv_heads + 1) if kv_heads % count == 0)
    advice = f"{kv_heads} KV heads do not split over {size} ranks; use {fitting}, or a multiple of {kv_heads}"
    return Row("tensor parallel", "fail", f"{kv_heads} KV heads, {size} ranks", advice)


def _positions(config: Any, text: Any) -> Row:
    if any(getattr(part, "dual_chunk_attention_config", None) for part in (config, text)):
        kinds = {"dual-chunk"}
    else:
        kinds = _rope_kinds(text)
    if not kinds:
        advice = "chunks cannot move without rotary positions (learned, absolute or ALiBi ones); use another model"
        return Row("positions", "fail", "no rotary positions", advice)
    found = f"rotary: {', '.join(sorted(kinds))}"
    if kinds <= MOVABLE_ROPE:
        return Row("positions", "ok", f"{found}; can move")
    if kinds & {"fope", "dual-chunk"}:
        return Row(
            "positions", "fail", found, "keys of this kind cannot be moved to another place; use another model"
        )
    advice = "never tried; the engine measures at start whether keys can move, and says so if they cannot"
    return Row("positions", "warn", found, advice)


def _rope_kinds(text: Any) -> set[str]:
    """The kinds of rotary tables, of which a model may have one per kind of layer; empty when it has none."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        # The oldest rotary models name only the number of columns that turn.
        return {"default"} if getattr(text, "rotary_dim", None) else set()
    tables = [table for table in parameters.values() if isinstance(table, dict)] or [parameters]
    return {
        "fope"
        if table.get("use_fope")
        else "mrope"
        if "mrope_section" in table
        else table.get("rope_type", "default")
        for table in tables
    }


def _layer_kinds(text: Any) -> Iterator[Row]:
    kinds = Counter(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if not kinds and window and getattr(text, "use_sliding_window", True):
        kinds["sliding_attention"] = text.num_hidden_layers
    if states := kinds.keys() & STATE_LAYERS:
        advice = "a recurrent state cannot be cut into chunks; use a model with attention in every layer"
        yield Row("layers", "fail", ", ".join(sorted(states)), advice)
    if sliding := kinds["sliding_attention"]:
        found = f"{sliding} of {text.num_hidden_layers} layers; works, all are stored in full for now"
        yield Row("sliding window", "ok", found)
    if others := kinds.keys() - ATTENTION_LAYERS - STATE_LAYERS:
        advice = "never tried; compare answers with those at recompute_ratio=1.0 before relying on it"
        yield Row("layers", "warn", ", ".join(sorted(others)), advice)
