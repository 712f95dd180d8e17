"""Small parts of ``compat``, without an engine."""

from dataclasses import fields, make_dataclass
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

from kvmosaic.engines.vllm.compat.cache import keeping_all_tokens, unsupported_latent
from kvmosaic.engines.vllm.compat.layers import _Announced

SIZES = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
WINDOWED = SlidingWindowSpec(sliding_window=20, block_size=16, **SIZES)
WHOLE = FullAttentionSpec(block_size=64, **SIZES)


def test_layers_with_a_window_keep_all_tokens_if_others_do():
    made = keeping_all_tokens({"a": WINDOWED, "b": WHOLE})
    assert made["b"] is WHOLE
    assert type(made["a"]) is FullAttentionSpec
    for each in fields(AttentionSpec):
        assert getattr(made["a"], each.name) == getattr(WHOLE if each.name == "block_size" else WINDOWED, each.name)
    assert FullAttentionSpec.merge(list(made.values())).sliding_window == 20  # vLLM treats them as one group


def test_all_layers_with_a_window_are_left_to_vllm():
    assert keeping_all_tokens({"a": WINDOWED, "b": WINDOWED}) == {"a": WINDOWED, "b": WINDOWED}


def test_what_vllm_sets_on_a_backend_reaches_it():
    backend = SimpleNamespace(world_size=-1)
    announced = _Announced(SimpleNamespace(), backend, lambda layer: None)
    announced.world_size = 1
    assert (backend.world_size, announced.world_size) == (1, 1)


@pytest.mark.parametrize(("use_mla", "is_v2", "is_by_order"), [(1, 1, 1), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_latent_attention_that_loses_contexts_is_refused(monkeypatch, use_mla, is_v2, is_by_order):
    """vLLM 0.26 loses contexts in this way."""
    context = make_dataclass("Context", [("prefill_tokens_with_context", int)] if is_by_order else [])
    monkeypatch.setattr(MLACommonPrefillMetadata, "ChunkedContextMetadata", context)
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla), use_v2_model_runner=is_v2)
    assert len(unsupported_latent(config)) == (use_mla and is_v2 and is_by_order)
