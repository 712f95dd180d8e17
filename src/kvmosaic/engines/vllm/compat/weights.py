"""The weights that vLLM loaded, where they came from, and which methods may change them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
"""Load formats that read all weights from a folder's safetensors files or, without any, from its other weight
files."""
CHANGING = (
    "apply_model",
    "checkpoint_restore",
    "discard",
    "elastic_ep_execute",
    "finish_weight_update",
    "load_weights",
    "reload_weights",
    "reset_weights",
    "start_weight_update",
    "update_weights",
    "wake_up",
)
"""Methods of vLLM's workers, in any supported release, that may change weights."""
HARMLESS = frozenset(
    {
        *("add_lora", "list_loras", "pin_lora", "remove_lora"),
        *("check_health", "profile", "reset_encoder_cache", "reset_mm_cache", "synchronize_device"),
        *("execute_dummy_batch", "execute_model", "sample_tokens", "take_draft_token_ids"),
        *("device", "local_rank", "model_config", "parallel_config", "rank", "vocab_size"),
        *("get_kv_cache_spec", "get_model_inspection", "get_supported_tasks", "shutdown"),
    }
)
"""Names of a worker that vLLM itself looks up by name, in steps or often, and that change no weights. (Weights of
adapters are watched by themselves.)"""
OURS = "chunk_cache_"
"""Prefix of our own names."""
COLUMNS = 8
"""Number of columns that are sampled of a matrix that only supports multiplication."""


def watch_calls(note: Callable[[], None]) -> None:
    """Have ``note`` called before anything of a worker is looked up by name that may change weights: any method that
    ``collective_rpc`` calls, also of an extension class, and the attributes by which a function that it sends gets at
    the model. Only names that are known to be harmless are left out."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    look_up = WorkerWrapperBase.__getattr__

    def watching(wrapper: Any, name: str) -> Any:
        if name not in HARMLESS and not name.startswith((OURS, "__")):
            note()
        return look_up(wrapper, name)

    WorkerWrapperBase.__getattr__ = watching  # type: ignore[method-assign]


def weight_files(model: Any, load: Any) -> tuple[str, str | None, str | None] | None:
    """Model, revision and the hub's cache folder; ``None`` unless the loaded weights certainly come from the files
    there. ``model`` is vLLM's ``ModelConfig``, ``load`` its ``LoadConfig``."""
    from vllm import envs

    is_elsewhere = bool(getattr(model, "model_weights", None)) or getattr(envs, "VLLM_USE_MODELSCOPE", False)
    format_ = str(getattr(load.load_format, "value", load.load_format))
    if is_elsewhere or (format_ not in FROM_FILES and not _is_one_file(model.model)):
        return None
    return model.model, model.revision, load.download_dir


def _is_one_file(model: str) -> bool:
    return model.endswith(".gguf") and Path(model).is_file()


def loaded_model(runner: Any) -> Any:
    """The model itself, without a runner's wrappers."""
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def loaded_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and contents of all weights; only some columns of matrices that a CPU's library keeps packed."""
    for name, parameter in model.named_parameters():
        yield from _plain(name, parameter)
    for name, module in model.named_modules():
        weight, multiply = getattr(module, "weight", None), getattr(module, "cpu_linear", None)
        width = getattr(module, "input_size_per_partition", None)
        if weight is None or weight.numel() or multiply is None or width is None:
            continue
        # Each row picks one column. All other numbers are multiplied by zero, so the result is exact in any summation
        # order.
        columns = torch.arange(min(COLUMNS, width)) * width // min(COLUMNS, width)
        rows = torch.zeros(len(columns), width, dtype=weight.dtype).scatter_(1, columns[:, None], 1)
        with torch.inference_mode():
            yield f"{name}.columns", multiply(rows, None, None)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that hold a parameter's data: some kinds of parameters consist of several."""
    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, dict):
        for index, part in partitions.items():
            yield from _plain(f"{name}.{index}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for inner in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _plain(f"{name}.{inner}", getattr(tensor, inner))
    else:
        yield name, tensor
