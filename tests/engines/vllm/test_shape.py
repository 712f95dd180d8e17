"""Sizes of an engine that the scheduler's rules depend on."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvmosaic.core.config import load_config
from kvmosaic.engines.vllm.shape import MAX_SEGMENT_TOKENS, SEGMENT_TOKENS, EngineShape, segment_tokens


def shape(window=None, block_size=16, drafts=None, prefix_caching=True, stages=1, dtype=torch.float32, **settings):
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=16, dtype=dtype, sliding_window=window)
    caches = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer"], spec)])
    config = SimpleNamespace(
        speculative_config=drafts,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=stages,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        cache_config=SimpleNamespace(
            block_size=block_size, hash_block_size=None, prefix_match_unit=None, enable_prefix_caching=prefix_caching
        ),
        model_config=SimpleNamespace(max_model_len=4096, hf_text_config=SimpleNamespace(num_hidden_layers=30)),
    )
    return EngineShape.of(config, caches, load_config(**settings))


def test_what_vllm_says():
    it = shape()
    assert (it.block_size, it.hash_block_size, it.ranks, it.step_tokens) == (16, 16, 2, 512)
    assert (it.max_positions, it.num_layers, it.has_drafts) == (4096, 30, False)
    assert (it.segment_tokens, it.window_tail) == (SEGMENT_TOKENS, None)


def test_blocks_of_bytes_hold_rounded_kv():
    assert [shape(dtype=dtype).is_quantised for dtype in (torch.float32, torch.uint8)] == [False, True]


def test_ranks_of_all_pipeline_stages():
    assert shape(stages=3).ranks == 6


def test_what_the_prefix_cache_can_hold():
    assert shape().prefix_cache_tokens == 160
    assert shape(prefix_caching=False).prefix_cache_tokens == 0


def test_segments_are_whole_blocks():
    assert shape(block_size=96).segment_tokens == 288


@pytest.mark.parametrize(
    ("arguments", "tail"),
    [
        ({"window": 40}, 48),
        ({"window": 49}, 48),  # a token sees itself and 48 before it
        ({"window": 50}, 64),
        ({"window": 40, "drafts": object()}, 64),  # drafts begin a token earlier
        ({"window": 40, "window_tails": False}, None),
        ({"window": 40, "stages": 2}, None),  # a stage's entry does not name its layers with a window
        ({"window": 40, "recompute_ratio": 0.5, "policy": "composite"}, None),  # looks inside chunks
        ({"window": 40, "recompute_ratio": 0.5, "policy": "sink-link"}, 48),
        ({"window": 40, "recompute_ratio": 1.0, "policy": "composite"}, 48),
    ],
)
def test_what_entries_keep_of_layers_with_a_window(arguments, tail):
    assert shape(**arguments).window_tail == tail


def test_segments_are_long_enough_to_leave_something_out_and_do_not_depend_on_whether_it_is():
    assert segment_tokens(None) == segment_tokens(100) == SEGMENT_TOKENS
    assert segment_tokens(500) == 1000
    assert segment_tokens(MAX_SEGMENT_TOKENS // 2) == MAX_SEGMENT_TOKENS
    assert segment_tokens(MAX_SEGMENT_TOKENS // 2 + 1) == SEGMENT_TOKENS
    assert shape(window=400).segment_tokens == shape(window=400, window_tails=False).segment_tokens == 800


def test_blocks_and_cuts():
    it = shape(window=40)
    assert [it.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [it.is_cut(tokens) for tokens in (48, 49)] == [False, True]
    assert not shape().is_cut(10**6)
