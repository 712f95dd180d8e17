"""vLLM's rotary modules."""

from typing import Any

import torch


def rotary_modules(model: torch.nn.Module) -> list[Any]:
    """All modules of a model that have a rotary table, each once."""
    modules = {
        id(module): module
        for module in model.modules()
        if hasattr(module, "cos_sin_cache") or hasattr(module, "long_short_cos_sin_cache")
    }
    return list(modules.values())


def rotary_table(module: Any) -> torch.Tensor:
    """The table in use, ``[positions, width]``: cos, then sin."""
    both: torch.Tensor | None = getattr(module, "long_short_cos_sin_cache", None)
    if both is None:
        return module.cos_sin_cache
    # Two tables one after the other; vLLM picks one when it starts.
    return both[module.original_max_position_embeddings :] if module.use_long_rope else both
