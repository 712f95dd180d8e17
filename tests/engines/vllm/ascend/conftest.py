"""vLLM on a CPU with a stand-in for vllm-ascend, because only machines with an NPU can import that."""

import sys
from pathlib import Path

import pytest
import torch

STANDIN = Path(__file__).parent / "standin"


@pytest.fixture(scope="module")
def standin():
    """Engines that start from now on use the stand-in's backend, with K and V in two tensors. Block size is 128."""
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention import selector

    def bind(self, kv_cache):
        shape = (-1, 128, self.num_kv_heads, self.head_size)
        self.kv_cache = tuple(torch.zeros(kv_cache.numel() // 2).to(kv_cache.dtype).view(shape) for _ in range(2))

    backend = "vllm_ascend.attention.attention_v1.AscendAttentionBackend"
    selector._cached_get_attn_backend.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STANDIN)
        patch.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(lambda *given, **named: backend))
        patch.setattr(Attention, "bind_kv_cache", bind, raising=False)
        yield
    selector._cached_get_attn_backend.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_ascend"]:
        del sys.modules[name]
