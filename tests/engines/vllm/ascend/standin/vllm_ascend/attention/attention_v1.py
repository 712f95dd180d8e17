from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

BLOCK = 128


class AscendAttentionState(Enum):
    PrefillNoCache = 0
    PrefillCacheHit = 1
    DecodeOnly = 2
    ChunkedPrefill = 3
    SpecDecoding = 4


@dataclass
class AscendMetadata:
    num_actual_tokens: int
    block_tables: torch.Tensor
    seq_lens_list: list[int]
    actual_seq_lengths_q: list[int]
    slot_mapping: torch.Tensor
    is_of_plugin: bool
    """Whether it was built from the plugin's own type. vLLM's CPU runner, unlike the plugin's, builds it from vLLM's
    type."""


class AscendAttentionBackend(AttentionBackend):
    accept_output_buffer = True

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return AscendAttentionBackendImpl

    @staticmethod
    def get_builder_cls():
        return AscendAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [BLOCK]


class AscendAttentionMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        is_of_plugin = isinstance(common, AscendCommonAttentionMetadata)
        if is_of_plugin:
            assert common.attn_state is AscendAttentionState.ChunkedPrefill
            assert common.slot_mapping.dtype == common.block_table_tensor.dtype == torch.int32
            assert common.num_input_tokens == common.num_actual_tokens
            lengths = common.query_start_loc_cpu.diff()
            assert torch.equal(common.num_computed_tokens_cpu + lengths, common.seq_lens_cpu)
        seq_lens = common.seq_lens_cpu if is_of_plugin else common.seq_lens
        return AscendMetadata(
            num_actual_tokens=common.num_actual_tokens,
            block_tables=common.block_table_tensor,
            seq_lens_list=seq_lens[: common.num_reqs].tolist(),
            actual_seq_lengths_q=common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist(),
            slot_mapping=common.slot_mapping[: common.num_actual_tokens],
            is_of_plugin=is_of_plugin,
        )


class AscendAttentionBackendImpl(AttentionImpl):
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        **kwargs,
    ):
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        assert slot_mapping.dtype == torch.int32
        for cache, rows in zip(kv_cache, (key, value), strict=True):
            cache.view(-1, *cache.shape[2:])[slot_mapping.long()] = rows

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output=None,
        output_scale=None,
        output_block_scale=None,
    ):
        if attn_metadata is None:
            return output.fill_(0)
        if attn_metadata.is_of_plugin:
            assert get_forward_context().capturing is False  # AttributeError outside of the plugin's context
        count = attn_metadata.num_actual_tokens
        self.do_kv_cache_update(layer, key[:count], value[:count], kv_cache, attn_metadata.slot_mapping.int())
        begin = 0
        rows = zip(attn_metadata.actual_seq_lengths_q, attn_metadata.seq_lens_list, strict=True)
        for index, (end, length) in enumerate(rows):
            blocks = attn_metadata.block_tables[index, : -(-length // BLOCK)].long()
            k, v = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in kv_cache)
            asking = torch.arange(length - (end - begin), length)[:, None]
            seen = torch.arange(length) <= asking
            if self.sliding_window is not None:
                seen &= torch.arange(length) > asking - self.sliding_window
            q = query[begin:end].transpose(0, 1)
            output[begin:end] = scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=True
            ).transpose(0, 1)
            begin = end
        return output
