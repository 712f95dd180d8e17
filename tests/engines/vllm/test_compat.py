"""Small parts of ``compat``, without an engine."""

from dataclasses import fields, make_dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from kvmosaic.engines.vllm.compat.cache import (
    keeping_all_tokens,
    served_cache,
    unsupported_cache,
    unsupported_latent,
)
from kvmosaic.engines.vllm.compat.graphs import (
    add_larger_graphs,
    drop_larger_graphs,
    graph_size,
    has_room_for_graphs,
    larger_graphs,
)
from kvmosaic.engines.vllm.compat.layers import _Announced

SIZES = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
WINDOWED = SlidingWindowSpec(sliding_window=20, block_size=16, **SIZES)
WHOLE = FullAttentionSpec(block_size=64, **SIZES)
NARROW = replace(WHOLE, num_kv_heads=1)


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


DRAFT = SimpleNamespace(draft_model_config=SimpleNamespace(model="owner/draft"))


def with_layers(draft, **specs):
    """A configuration of a model of two layers, and the cache that vLLM makes for layers of these specs."""
    models = {"m": "model", "d": "draft_model"}
    names = {f"{models[name[0]]}.layers.{name[1:]}": spec for name, spec in specs.items()}
    whole = UniformTypeKVCacheSpecs.from_specs(names)
    if whole is None:
        groups = [KVCacheGroupSpec([name], spec) for name, spec in names.items()]
    else:
        groups = [KVCacheGroupSpec([*names], whole)]
    model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2))
    return SimpleNamespace(speculative_config=draft, model_config=model), KVCacheConfig(10, [], groups)


@pytest.mark.parametrize("name", ["d0", "m2"])
def test_a_draft_model_of_another_shape_changes_nothing_for_the_model(name):
    config, caches = with_layers(DRAFT, m0=WHOLE, m1=WHOLE, **{name: NARROW})
    [group] = served_cache(config, caches).kv_cache_groups
    assert (group.layer_names, group.kv_cache_spec) == (["model.layers.0", "model.layers.1"], WHOLE)
    assert unsupported_cache(config, caches) == []
    config.speculative_config = None
    assert "this model" in unsupported_cache(config, caches)[0]


def test_layers_of_the_model_that_differ_are_refused_with_any_draft_model():
    assert "this model" in unsupported_cache(*with_layers(DRAFT, m0=WHOLE, m1=NARROW, m2=WHOLE))[0]


def test_a_draft_model_in_a_group_of_its_own_is_refused_by_its_name():
    [line] = unsupported_cache(*with_layers(DRAFT, m0=WHOLE, m2=WINDOWED))
    assert "owner/draft" in line


def runner_with_graphs(*sizes, **changes):
    """A runner of vLLM that has piecewise graphs of some sizes, not captured yet."""
    graphs = [BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, num_tokens=size, num_reqs=None) for size in sizes]
    manager = SimpleNamespace(
        _capture_descs={CUDAGraphMode.PIECEWISE: graphs},
        _graphs_captured=False,
        compilation_config=SimpleNamespace(splitting_ops=["vllm::unified_kv_cache_update"]),
    )
    sizes_of_8b = {"get_total_num_hidden_layers": lambda: 32, "get_hidden_size": lambda: 4096}
    runner = SimpleNamespace(
        cudagraph_manager=manager,
        device=torch.device("cuda"),
        lora_config=None,
        max_num_tokens=1200,
        model_config=SimpleNamespace(use_mla=False, max_model_len=8192, **sizes_of_8b),
        model_state=None,
    )
    vars(runner).update(changes)
    return runner


def sizes_of(runner):
    return [graph.num_tokens for graph in runner.cudagraph_manager._capture_descs[CUDAGraphMode.PIECEWISE]]


SHORT = SimpleNamespace(use_mla=False, max_model_len=800)


@pytest.mark.parametrize(
    ("own", "changes", "added"),
    [
        ((512, 256, 1), {}, [1152, 1024, 896, 768, 640]),
        ((1000, 512), {}, [1152, 1024]),
        ((512, 1), {"max_num_tokens": 512}, []),
        ((512, 1), {"model_config": SHORT}, [768, 640]),  # longer sequences have no rotary positions
        ((16, 1), {}, []),  # all passes of 17 tokens and more would be padded to 640
        ((512, 1), {"lora_config": object()}, []),
    ],
)
def test_vllm_captures_larger_graphs_too_where_they_can_be_used(own, changes, added):
    runner = runner_with_graphs(*own, **changes)
    add_larger_graphs(runner)
    assert sizes_of(runner) == [*added, *own]
    assert graph_size(runner, own[0] + 1) is None  # nothing is captured yet
    runner.cudagraph_manager._graphs_captured = True
    assert larger_graphs(runner) == added[::-1]
    assert graph_size(runner, own[0] + 1) == (added[-1] if added else None)
    drop_larger_graphs(runner)
    assert not larger_graphs(runner)
    assert sizes_of(runner) == list(own)


@pytest.mark.parametrize(
    ("device", "free", "has_room"), [("cuda", 2.1, True), ("cuda", 1.9, False), ("cpu", 99, False)]
)
def test_larger_graphs_need_memory(device, free, has_room, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 2**40))
    assert has_room_for_graphs(runner_with_graphs(512, device=torch.device(device))) is has_room


def test_a_runner_without_graphs_gets_none():
    add_larger_graphs(SimpleNamespace())
    add_larger_graphs(SimpleNamespace(cudagraph_manager=None))
