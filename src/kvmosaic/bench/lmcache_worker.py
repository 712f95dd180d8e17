"""A worker of vLLM 0.26 in which LMCache 0.5.3 can blend. As shipped, it cannot, for two reasons:

- Its blender asks for the model, which nobody registers. This worker does.
- Its kernel that copies one layer does not know the layout of vLLM's cache, in which K and V of a head are
  neighbours. A view of the same memory has a layout that the kernel knows: blocks of one token and one head.
"""

from typing import Any

import torch
from lmcache.integration.vllm.utils import ENGINE_NAME
from lmcache.v1.compute.blend.blender import LMCBlender
from lmcache.v1.compute.models.utils import VLLMModelTracker
from lmcache.v1.platform import resolve_device_ops
from vllm.v1.worker.gpu_worker import Worker

BLENDED: list[int] = []
"""Number of tokens of each prompt that was blended."""


class BlendWorker(Worker):
    """vLLM's worker, whose model and cache LMCache's blender can use."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        VLLMModelTracker.register_model(ENGINE_NAME, self.model_runner.model)
        _view_cache()
        _count_blends()


def _view_cache() -> None:
    """Have LMCache's copy kernel read and write vLLM's cache through a view that it knows."""
    ops = resolve_device_ops("cuda")
    kernel, formats = ops.single_layer_kv_transfer, ops.EngineKVFormat
    heads_first, known = int(formats.NL_X_NB_NH_BS_CS), formats.NL_X_NB_TWO_BS_NH_HS

    def transfer(
        buffer: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, direction: Any, layout: Any, token_major: bool
    ) -> None:
        """``buffer``: ``[2, tokens, heads * dim]``; ``cache``: ``[blocks, size, heads, 2 * dim]``, or with heads
        before size; ``slots``: ``[tokens]``."""
        assert not token_major
        assert cache.ndim == 4
        if int(layout) == heads_first:
            _, heads, size, width = cache.shape
            first, step = slots // size * (heads * size) + slots % size, size
        else:
            _, _, heads, width = cache.shape
            first, step = slots * heads, 1
        rows = first[:, None] + torch.arange(heads, device=slots.device) * step
        pairs = cache.view(-1, 2, 1, 1, width // 2)
        kernel(buffer.view(2, -1, width // 2), pairs, rows.flatten(), direction, known, False)

    ops.single_layer_kv_transfer = transfer


def _count_blends() -> None:
    blend = LMCBlender.blend

    def counted(self: Any, tokens: Any, mask: Any = None, **more: Any) -> Any:
        BLENDED.append(len(tokens))
        return blend(self, tokens, mask, **more)

    LMCBlender.blend = counted
