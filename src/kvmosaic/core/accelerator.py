"""torch's module for the accelerator in use: ``torch.cuda``, or ``torch.npu`` for an Ascend NPU. Both have streams,
events and memory under the same names."""

from typing import Any

import torch

KINDS = ("cuda", "npu")
"""Types of devices that are accelerators."""


def accelerator_of(device: torch.device) -> Any | None:
    """The module of a tensor's or a model's device; ``None`` for a CPU."""
    return getattr(torch, device.type) if device.type in KINDS else None


def accelerator_in_use() -> Any | None:
    """The module of the accelerator that this process has initialized; ``None`` without one. ``torch.npu`` is there
    once ``torch_npu`` is imported."""
    modules = (getattr(torch, kind, None) for kind in KINDS)
    return next((module for module in modules if module is not None and module.is_initialized()), None)


def accelerator_there() -> Any | None:
    """The module of an accelerator that this machine has, initialized or not; ``None`` without one."""
    modules = (getattr(torch, kind, None) for kind in KINDS)
    return next((module for module in modules if module is not None and module.is_available()), None)


def free_unused_memory() -> None:
    """Return accelerator memory that torch keeps for later."""
    module = accelerator_in_use()
    if module is not None:
        module.empty_cache()


def may_copy_later(data: torch.Tensor, to: torch.device) -> bool:
    """Whether a copy of ``data`` may still run when the call returns (``non_blocking``). CUDA reads host memory that
    is not pinned before it returns. For NPUs that is not documented."""
    return to.type == "cuda" or data.device.type != "cpu" or data.is_pinned()
