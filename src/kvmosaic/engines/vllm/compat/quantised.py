"""Quantised KV caches: how vLLM rounds what it caches."""

from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes of cached numbers, by vLLM's names of them."""


@dataclass(frozen=True)
class Quantised:
    """How a layer's cache is quantised. A cached number is the computed one, divided by the layer's scale and rounded
    to 8 bits."""

    name: str
    """vLLM's name of the dtype."""
    k_scale: float
    v_scale: float
    q_scale: float
    """Scale of queries, which some backends quantise as well."""

    @classmethod
    def of(cls, module: Any) -> "Quantised | None":
        """Quantisation of a layer's cache, if it has one."""
        if module.kv_cache_dtype not in DTYPES:
            return None
        scales = module._k_scale_float, module._v_scale_float, module._q_scale_float
        return cls(module.kv_cache_dtype, *map(float, scales))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of cached numbers. The cache itself may be declared as bytes."""
        return DTYPES[self.name]


def has_scales_per_head(module: Any) -> bool:
    """Whether each head of a layer has scales of its own."""
    return bool(module._k_scale.numel() > 1)
