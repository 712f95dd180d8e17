"""The kernel compared with attention in fp64, on a GPU if there is one, otherwise in Triton's interpreter."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.required import need_triton

GPU = torch.cuda.is_available()
need_triton()
from kvmosaic.kernels import queries as queries_module  # noqa: E402
from kvmosaic.kernels.queries import Asking, Queries  # noqa: E402
from kvmosaic.kernels.sparse_attention import sparse_attention, sparse_attention_reference  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Rounding errors of the result and of the weights, each rounded once, for values of about 1."""


@pytest.fixture(params=["flat", "paged"], autouse=True)
def copies(request, monkeypatch):
    """Whether blocks are copied behind each other, in layers and formats where they can be."""
    monkeypatch.setattr(queries_module, "FLAT_FROM", 0 if request.param == "flat" else 10**9)
    return request.param


def random_positions(chance, length):
    """Positions of single tokens, of runs, or of the whole end of a sequence."""
    kind = chance.choice(["lone", "runs", "all"])
    if kind == "all":
        return np.arange(length)[-200:]
    positions = set(chance.sample(range(length), chance.randint(1, max(1, min(length, 200) // 4))))
    if kind == "runs":
        width = chance.randint(2, 20)
        positions = {min(at + step, length - 1) for at in positions for step in range(width)}
    return np.array(sorted(positions))


def random_case(seed, copies):
    """A case for which blocks are copied, or any case."""
    chance, torch_chance = random.Random(seed), torch.Generator().manual_seed(seed)
    group, kv_heads = chance.choice([1, 2, 3, 4, 7, 8]), chance.choice([1, 2, 3])
    can_copy = [(64, 64), (128, 128), (128, 64)]
    k_dim, v_dim = chance.choice(can_copy if copies == "flat" else [*can_copy, (256, 256), (80, 80), (96, 48)])
    block_size, longest = chance.choice([16, 32, 48]), 1500 if copies == "flat" else chance.choice([200, 1500])
    dtypes = [
        torch.float32,
        torch.float16,
        *([torch.bfloat16] if GPU else []),
    ]  # the interpreter is wrong in bf16
    dtype = chance.choice(dtypes[copies == "flat" :])
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
    window = None if copies == "flat" else chance.choice([None, None, 1, 17, 64, 100])
    at_once = chance.choice([1, 4, 33])
    return q, cache, Queries.of(sequences, group, DEVICE, at_once), k_dim**-0.5, window, v_dim


@pytest.mark.parametrize("case", range(30 if GPU else examples(16, 8)))
def test_attention_is_that_of_the_reference(case, copies):
    q, cache, queries, scale, window, v_dim = random_case(seed := random.randrange(10**9), copies)
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sets(st.integers(0, 40000), min_size=1), min_size=1, max_size=5), st.sampled_from([1, 3, 8]),
       st.integers(1, 300))  # fmt: skip
def test_parts_cover_what_tiles_read(copies, positions, group, at_once):
    asking = [Asking(np.array(sorted(each)), range(index, 3000 + index)) for index, each in enumerate(positions)]
    queries = Queries.of(asking, group, torch.device("cpu"), at_once)
    assert (queries.flat is not None) == (copies == "flat")
    tiles, rows, at_once = (
        (queries.tiles, 128, at_once) if copies == "paged" else (queries.flat.tiles, 64, 2 * at_once)
    )
    if copies == "flat":
        copied = queries.flat.blocks.tolist()
        for sequence, (_, blocks) in enumerate(asking):
            assert [copied[place] for place in tiles.blocks[sequence].tolist()] == list(blocks)
    read, slots = {}, []
    for first, end, sequence, first_key, end_key, slot in sorted(tiles.key_ranges.tolist()):
        assert first_key % 128 == 0
        assert first_key == read.get((first, end, sequence), 0) < end_key
        read[first, end, sequence] = end_key
        slots += [slot] if slot >= 0 else []
    for (first, end, _), keys in read.items():
        assert end - first <= rows // group
        assert keys == queries.positions[end - 1] + 1
    tokens = [token for first, end, _ in sorted(read) for token in range(first, end)]
    assert tokens == list(range(len(queries.positions)))
    assert slots == list(range(tiles.slots))
    assert sum(end - begin for *_, begin, end in tiles.split.tolist()) == tiles.slots <= 2 * at_once
    sizes = [end - begin for *_, begin, end, _ in tiles.key_ranges.tolist()]
    assert sizes == sorted(sizes, reverse=True)
    total = sum(int(keys) for keys in read.values())
    if len(read) >= at_once:
        assert not slots
    else:
        assert sizes[0] <= max(512, total // at_once + 128)


def test_a_token_does_not_see_what_comes_after_it(copies):
    """It also does not see other sequences' blocks or the rest of a block, which may hold anything."""
    q, cache, queries, scale, window, v_dim = random_case(random.randrange(10**9), copies)
    out = torch.empty(*q.shape[:2], v_dim, dtype=q.dtype, device=DEVICE)
    sparse_attention(q, cache, queries, scale, window, out)
    seen = torch.zeros(cache.shape[0], cache.shape[2], dtype=torch.bool)
    for first, end, sequence, *_ in queries.tiles.key_ranges.tolist():
        for position in range(int(queries.positions[first:end].max()) + 1):
            seen[queries.tiles.blocks[sequence][position // cache.shape[2]], position % cache.shape[2]] = True
    spoilt = torch.where(seen[:, None, :, None].to(DEVICE), cache, float("nan"))
    again = torch.empty_like(out)
    sparse_attention(q, spoilt, queries, scale, window, again)
    assert torch.equal(out, again)
