"""The kernel against attention in fp64: on a GPU where there is one, else in Triton's interpreter."""

import random

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
pytest.importorskip("triton")
from kvmosaic.kernels.sparse_attention import (  # noqa: E402
    Asking,
    Queries,
    sparse_attention,
    sparse_attention_reference,
)

DEVICE = torch.device("cuda" if GPU else "cpu")
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the result and of the weights, each of which is rounded once, for values of about 1."""


def random_positions(chance, length):
    """Lone tokens, runs, or all of a sequence."""
    kind = chance.choice(["lone", "runs", "all"])
    if kind == "all":
        return np.arange(length)
    positions = set(chance.sample(range(length), chance.randint(1, max(1, length // 4))))
    if kind == "runs":
        width = chance.randint(2, 20)
        positions = {min(at + step, length - 1) for at in positions for step in range(width)}
    return np.array(sorted(positions))


def random_case(seed):
    chance, torch_chance = random.Random(seed), torch.Generator().manual_seed(seed)
    group, kv_heads = chance.choice([1, 2, 3, 4, 7, 8]), chance.choice([1, 2, 3])
    k_dim, v_dim = chance.choice([(64, 64), (128, 128), (256, 256), (80, 80), (96, 48)])
    block_size, longest = chance.choice([16, 32, 48]), 600 if GPU else 200
    dtypes = [
        torch.float32,
        torch.float16,
        *([torch.bfloat16] if GPU else []),
    ]  # the interpreter errs in bf16
    dtype = chance.choice(dtypes)
    lengths = [chance.randint(1, longest) for _ in range(chance.randint(1, 3))]
    counts = [-(-length // block_size) for length in lengths]
    ids = chance.sample(range(1, sum(counts) + 3), sum(counts))
    sequences = []
    for length, count in zip(lengths, counts, strict=True):
        sequences.append(Asking(random_positions(chance, length), [ids.pop() for _ in range(count)]))

    def draw(*shape):
        return torch.randn(*shape, generator=torch_chance).to(DEVICE, dtype)

    cache = draw(sum(counts) + 3, block_size, kv_heads, k_dim + v_dim).transpose(1, 2)
    tokens = sum(len(each.positions) for each in sequences)
    q = draw(tokens, kv_heads * group, k_dim)
    window = chance.choice([None, None, 1, 17, 64, 100])
    return q, cache, Queries.of(sequences, group, DEVICE), k_dim**-0.5, window, v_dim


@pytest.mark.parametrize("case", range(30 if GPU else 16))
def test_attention_is_that_of_the_reference(case):
    q, cache, queries, scale, window, v_dim = random_case(seed := random.randrange(10**9))
    out, wanted = (
        torch.full((*q.shape[:2], v_dim), float("nan"), dtype=dtype, device=DEVICE)
        for dtype in (q.dtype, torch.float64)
    )
    sparse_attention(q, cache, queries, scale, window, out)
    sparse_attention_reference(q.double(), cache.double(), queries, scale, window, wanted)
    error = (out.double() - wanted).abs()
    assert error.isfinite().all(), f"seed {seed}"
    assert (error <= ROUNDING[q.dtype] * (1 + wanted.abs())).all(), f"seed {seed}: {error.max()}"
    again = torch.empty_like(out)
    sparse_attention(q, cache, queries, scale, window, again)
    assert torch.equal(out, again), f"seed {seed}"


def test_a_token_does_not_see_what_comes_after_it():
    """Nor what stands in blocks of others, or in the rest of a block: all of that may be anything."""
    q, cache, queries, scale, window, v_dim = random_case(random.randrange(10**9))
    out = torch.empty(*q.shape[:2], v_dim, dtype=q.dtype, device=DEVICE)
    sparse_attention(q, cache, queries, scale, window, out)
    seen = torch.zeros(cache.shape[0], cache.shape[2], dtype=torch.bool)
    for first, end, sequence in queries.tiles.tolist():
        for position in range(int(queries.positions[first:end].max()) + 1):
            seen[queries.blocks[sequence][position // cache.shape[2]], position % cache.shape[2]] = True
    spoilt = torch.where(seen[:, None, :, None].to(DEVICE), cache, float("nan"))
    again = torch.empty_like(out)
    sparse_attention(q, spoilt, queries, scale, window, again)
    assert torch.equal(out, again)
