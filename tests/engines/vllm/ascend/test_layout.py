"""K and V in two tensors, as in vllm-ascend, read by torch operations and compared with the kernels' reference."""

import random

import pytest
import torch

from kvmosaic.core.entry import PackedKV
from kvmosaic.core.window import WHOLE
from kvmosaic.engines.vllm.paged.pair_reader import PairReader
from kvmosaic.kernels.paged import Move, PagedCaches, gather_reference

BLOCKS, SIZE, HEADS = 7, 128, 2


def as_one(pairs):
    """The same numbers in one tensor for each layer, as our kernels take them."""
    layers = [torch.cat(pair, dim=-1).transpose(1, 2).contiguous() for pair in pairs]
    return PagedCaches(layers, pairs[0][0].shape[-1], [None] * len(layers), None)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(64, 64), (24, 16)])
def test_blocks_are_read_as_the_reference_reads_them(k_dim, v_dim):
    pairs = [
        tuple(torch.randn(BLOCKS, SIZE, HEADS, dim).to(torch.bfloat16) for dim in (k_dim, v_dim)) for _ in range(3)
    ]
    caches, reader = as_one(pairs), PairReader(pairs)
    form = caches.format(WHOLE, is_int8=False)
    for _ in range(20):
        blocks = random.sample(range(BLOCKS), 4)
        start, end = sorted(random.sample(range(4 * SIZE + 1), 2))
        data = torch.empty(form.heads, form.num_elements(end - start), dtype=form.stored_dtype)
        gather_reference([Move(data, end - start, 0, start)], caches, blocks)
        assert torch.equal(PackedKV.of(*reader.read(blocks, start, end), form).data, data)
