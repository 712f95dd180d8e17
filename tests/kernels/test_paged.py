"""The Triton kernel compared with its torch reference, on a GPU if there is one, otherwise in Triton's
interpreter."""

import random

import pytest
import torch

from tests.examples import examples
from tests.required import need_triton

GPU = torch.cuda.is_available()
need_triton()
from kvmosaic.core.rotation import RotaryColumns  # noqa: E402
from kvmosaic.core.window import WHOLE, WindowTails  # noqa: E402
from kvmosaic.kernels import paged  # noqa: E402
from kvmosaic.kernels.paged import (  # noqa: E402
    Move,
    PagedCaches,
    gather,
    gather_reference,
    scatter,
    scatter_reference,
    scatter_slowly,
)

DEVICE = "cuda" if GPU else "cpu"


DIMS = [(64, 64), (128, 128), (80, 80), (96, 48), (256, 256), (128, 32)]


def random_case(seed, dims=DIMS):
    """A paged cache of random geometry with rows of K and V of one of ``dims``, a sequence in it, and entries with
    places that do not overlap."""
    chance, torch_chance = random.Random(seed), torch.Generator().manual_seed(seed)
    layers, heads = chance.randint(1, 3), chance.choice([1, 2, 3, 8])
    k_dim, v_dim = chance.choice(dims)
    block_size, count = chance.choice([16, 32, 48]), chance.randint(8, 20)
    dtype = chance.choice([torch.float32, torch.bfloat16, torch.float16])
    part, dim = chance.choice([("k", k_dim), ("k", k_dim), ("v", v_dim)])  # V turns in models with a latent
    width = chance.choice([dim, dim // 2, dim // 4])
    start = chance.choice([0, dim - width, 2 * chance.randint(0, (dim - width) // 2)])
    columns = RotaryColumns(part, start, width, interleaved=chance.random() < 0.3)

    def draw(*shape):
        return torch.randn(*shape, generator=torch_chance)

    def cache():
        if chance_of_layout:  # tokens before heads, as most backends have it
            return draw(count, block_size, heads, k_dim + v_dim).to(DEVICE, dtype).transpose(1, 2)
        return draw(count, heads, block_size, k_dim + v_dim).to(DEVICE, dtype)

    chance_of_layout = chance.random() < 0.5
    angles = torch.arange(count * block_size)[:, None] * draw(1, width // 2)
    scale = chance.choice([1.0, 1.3])  # a table may carry one
    table = (torch.cat([angles.cos(), angles.sin()], -1) * scale).to(DEVICE, chance.choice([torch.float32, dtype]))
    tables = [table if chance.random() < 0.8 else None for _ in range(layers)]
    caches = PagedCaches([cache() for _ in range(layers)], k_dim, tables, columns)
    blocks = chance.sample(range(count), count - chance.randint(0, 3))
    moves, position = [], chance.randint(0, 5)
    while True:
        tokens = chance.choice([1, 2, 31, 32, 33, chance.randint(1, 90)])
        if position + tokens > len(blocks) * block_size:
            break
        data = draw(heads, layers * tokens * (k_dim + v_dim)).to(DEVICE, dtype)
        moves.append(Move(data, tokens, chance.randint(0, 4), position))
        position += tokens + chance.randint(0, 3)
    return moves, caches, blocks, chance.randint(0, 40)


def with_tails(moves, caches, chance):
    """The same entries, without the tokens that some layers leave out."""
    layers = range(len(caches.layers))
    windowed = tuple(layer for layer in layers if chance.random() < 0.6)
    tails = WindowTails(windowed, chance.choice([1, 16, 31, 32, 48, 64]))
    width = caches.layers[0].shape[-1]
    cut = []
    for move in moves:
        numbers = sum(tails.kept(layer, move.tokens) for layer in layers) * width
        cut.append(move._replace(data=move.data[:, :numbers].contiguous()))
    return cut, tails


def copies(caches):
    return PagedCaches(
        [layer.clone(memory_format=torch.preserve_format) for layer in caches.layers],
        caches.k_dim,
        caches.tables,
        caches.columns,
    )


@pytest.mark.parametrize("case", range(100 if GPU else examples(12, 6)))
def test_scatter_equals_its_reference(case):
    seed = random.randrange(10**6)
    moves, caches, blocks, first = random_case(seed)
    expected = copies(caches)
    tails = WHOLE
    if case % 2:
        moves, tails = with_tails(moves, caches, random.Random(seed))
    scatter_reference(moves, expected, blocks, first, tails)
    scatter(moves, caches, blocks, first, tails)
    exact = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[caches.layers[0].dtype]
    for ours, theirs in zip(caches.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=exact, rtol=exact)


@pytest.mark.parametrize("change", ["more heads", "fewer heads", "dtype", "more numbers", "not contiguous"])
@pytest.mark.parametrize("move_all", [scatter, scatter_reference])
def test_an_entry_of_other_sizes_is_written_nowhere(change, move_all):
    """All entries agree, as in one engine. Behind the heads of the cache is foreign memory."""
    heads, k_dim, count, size = 2, 64, 4, 16
    whole = torch.zeros(count, 2 * heads, size, 2 * k_dim, device=DEVICE)
    caches = PagedCaches([whole[:, :heads]], k_dim, [None], None)
    data = torch.ones(heads, size * 2 * k_dim, device=DEVICE)
    wrong = {
        "more heads": torch.ones(2 * heads, size * 2 * k_dim, device=DEVICE),
        "fewer heads": data[:1],
        "dtype": data.half(),
        "more numbers": torch.ones(heads, 2 * size * 2 * k_dim, device=DEVICE),
        "not contiguous": torch.ones(heads, 2 * size * 2 * k_dim, device=DEVICE)[:, ::2],
    }[change]
    moves = [Move(wrong, size, 0, position) for position in (0, size)]
    with pytest.raises(ValueError, match="an entry of"):
        move_all(moves, caches, range(count))
    assert not whole.any()
    move_all([Move(data, size, 0, 0)], caches, range(count))
    assert whole[:1, :heads].all()
    assert not whole[:, heads:].any()


@pytest.mark.parametrize("case", range(100 if GPU else examples(12, 5)))
def test_gather_equals_its_reference(case):
    seed = random.randrange(10**6)
    moves, caches, blocks, _ = random_case(seed)
    expected = [move._replace(data=torch.zeros_like(move.data)) for move in moves]
    gather_reference(expected, caches, blocks)
    gather(moves, caches, blocks)
    for ours, theirs in zip(moves, expected, strict=True):
        assert torch.equal(ours.data, theirs.data)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(20 if GPU else examples(20, 8)))
def test_layers_arrive_group_by_group(case, monkeypatch):
    seed = random.randrange(10**6)
    monkeypatch.setattr(paged, "FEW_PROGRAMS", random.choice([1, 3, 32]))
    moves, caches, blocks, first = random_case(seed)
    moves, tails = with_tails(moves, caches, random.Random(seed))
    before, expected = copies(caches), copies(caches)
    scatter_reference(moves, expected, blocks, first, tails)
    cut = random.randint(0, len(caches.layers))
    groups = [group for group in (range(cut), range(cut, len(caches.layers))) if group]
    arrived = set()
    for group in scatter_slowly(moves, caches, blocks, first, tails, groups):
        arrived.update(group)
        for index, layer in enumerate(caches.layers):
            wanted = (expected if index in arrived else before).layers[index]
            torch.testing.assert_close(layer, wanted, rtol=0.02, atol=0.02)
    assert len(arrived) == len(caches.layers)


def test_what_is_gathered_scatters_back():
    moves, caches, blocks, _ = random_case(7)
    expected = copies(caches)
    moves = [move._replace(old=move.new) for move in moves]  # nothing turns
    gather(moves, caches, blocks)
    for layer in caches.layers:
        layer.zero_()
    scatter(moves, caches, blocks)
    for ours, theirs in zip(caches.layers, expected.layers, strict=True):
        covered = [position for move in moves for position in range(move.new, move.new + move.tokens)]
        rows = torch.tensor(blocks)[torch.tensor(covered) // caches.block_size]
        slots = torch.tensor(covered) % caches.block_size
        torch.testing.assert_close(ours[rows, :, slots], theirs[rows, :, slots], atol=1e-2, rtol=1e-2)
