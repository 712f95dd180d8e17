"""Half precision on CPUs with and without instructions for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import kvmosaic.engines.precision as precision

IS_NATIVE = torch.cuda.is_available() or precision.cpu_runs_bfloat16()
"""Whether vLLM runs in bfloat16 here."""
VLLM_HALF = "bfloat16" if IS_NATIVE else "float16"
"""The half precision that vLLM can run here."""

_HALVES = (torch.bfloat16, torch.float16)
_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "scaled_dot_product_attention")
)


@contextmanager
def fast_products() -> Iterator[None]:
    """Faster products of half-precision matrices in torch, on CPUs without instructions for them."""
    if IS_NATIVE:
        yield
        return
    with _WideProducts():
        yield


class _WideProducts(TorchDispatchMode):
    """Sums products in float32 and rounds the result, as instructions for half precision do.

    Without such instructions torch multiplies number by number: 32 tokens through SmolLM2 take two minutes.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        half = next((arg.dtype for arg in args if isinstance(arg, torch.Tensor) and arg.dtype in _HALVES), None)
        if half is None or func.overloadpacket not in _PRODUCTS:
            return func(*args, **kwargs)
        wide, options = tree_map_only(torch.Tensor, _widen, (args, kwargs))
        return func(*wide, **options).to(half)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def pretend_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path, features: str) -> None:
    """Pretend that this is an ARM machine whose CPU has these features."""
    cpuinfo = folder / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nFeatures\t: {features}\n\nprocessor\t: 1\nFeatures\t: {features}\n")
    monkeypatch.setattr(precision, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(precision.platform, "machine", lambda: "aarch64")
