"""Entries in 8 bits in and out of blocks: the Triton kernel is compared with its torch reference, and both with
bounds."""

import random

import pytest
import torch

from tests.examples import examples
from tests.kernels.test_paged import DEVICE, GPU, copies, random_case, with_tails
from tests.required import need_triton

need_triton()
from kvmosaic.core.entry import PackedKV  # noqa: E402
from kvmosaic.core.window import WHOLE, WindowTails  # noqa: E402
from kvmosaic.kernels.paged import (  # noqa: E402
    Move,
    gather,
    gather_reference,
    scatter,
    scatter_reference,
    scatter_slowly,
)

DIMS = [(32, 32), (64, 64), (48, 96), (80, 80), (128, 128), (256, 256), (512, 64), (576, 64), (64, 200)]
"""Rows with one scale and with several, of which the last group may be narrower."""


def loud_case(seed):
    """A random case with rows of many lengths, in which some groups of columns are far smaller than others, so that a
    scale of a wrong group is seen."""
    moves, caches, blocks, first = random_case(seed, DIMS)
    chance = torch.Generator().manual_seed(seed)
    loudness = torch.cat(
        [(3.0 ** torch.randint(-4, 1, (9,), generator=chance)).repeat_interleave(64)[:dim] for dim in _dims(caches)]
    )
    for layer in caches.layers:
        layer *= loudness.to(layer)
    for move in moves:
        rows = PackedKV(move.data, caches.format(WHOLE, is_int8=False), move.tokens)
        for layer in range(len(caches.layers)):
            k, v = rows.layer(layer)
            k *= loudness[: caches.k_dim].to(k)
            v *= loudness[caches.k_dim :].to(v)
    return moves, caches, blocks, first


def _dims(caches):
    return caches.k_dim, caches.v_dim


def in_8_bits(move, caches, tails):
    """The same KV in 8 bits."""
    exact = PackedKV(move.data, caches.format(tails, is_int8=False), move.tokens)
    packed = PackedKV.of(*exact.layers(), caches.format(tails, is_int8=True))
    return move._replace(data=packed.data)


def empty(move, caches, tails):
    """Room for the same tokens in 8 bits."""
    form = caches.format(tails, is_int8=True)
    shape = (form.heads, form.num_elements(move.tokens))
    return move._replace(data=torch.zeros(shape, dtype=torch.int8, device=DEVICE))


def mixed_case(seed):
    """Entries of which about half are in 8 bits, in layers that keep all tokens."""
    moves, caches, blocks, first = loud_case(seed)
    chance = random.Random(seed)
    return (
        [in_8_bits(move, caches, WHOLE) if chance.random() < 0.6 else move for move in moves],
        caches,
        blocks,
        first,
    )


@pytest.mark.parametrize("case", range(100 if GPU else examples(12, 2)))
def test_scatter_equals_its_reference(case):
    moves, caches, blocks, first = mixed_case(random.randrange(10**6))
    expected = copies(caches)
    scatter_reference(moves, expected, blocks, first)
    scatter(moves, caches, blocks, first)
    exact = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[caches.layers[0].dtype]
    for ours, theirs in zip(caches.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=exact, rtol=exact)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(100 if GPU else examples(12, 2)))
def test_gather_equals_its_reference(case):
    seed = random.randrange(10**6)
    moves, caches, blocks, _ = loud_case(seed)
    tails = WHOLE
    if case % 2:
        _, tails = with_tails(moves, caches, random.Random(seed))
    moves = [empty(move, caches, tails) for move in moves]
    expected = [move._replace(data=move.data.clone()) for move in moves]
    gather_reference(expected, caches, blocks, tails)
    gather(moves, caches, blocks, tails)
    for ours, theirs in zip(moves, expected, strict=True):
        assert theirs.data.any()
        if not GPU:
            assert torch.equal(ours.data, theirs.data)
            continue
        # A GPU adds and multiplies in one rounding, so a number that is halfway between two may be the other one.
        for layer in range(len(caches.layers)):
            form = caches.format(tails, is_int8=True)
            a, b = (PackedKV(move.data, form, move.tokens).parts(layer) for move in (ours, theirs))
            torch.testing.assert_close(a.k_scales, b.k_scales, rtol=1e-6, atol=0)
            assert torch.equal(a.v_scales, b.v_scales)
            for one, other in ((a.k, b.k), (a.v, b.v)):
                difference = (one.int() - other.int()).abs()
                assert difference.max() <= 1
                assert difference.sum() <= 1 + difference.numel() // 1000


@pytest.mark.parametrize("case", range(20 if GPU else examples(10, 2)))
def test_exact_gather_with_tails_equals_its_reference(case):
    seed = random.randrange(10**6)
    moves, caches, blocks, _ = random_case(seed)
    moves, tails = with_tails(moves, caches, random.Random(seed))
    moves = [move._replace(data=torch.zeros_like(move.data)) for move in moves]
    expected = [move._replace(data=torch.zeros_like(move.data)) for move in moves]
    gather_reference(expected, caches, blocks, tails)
    gather(moves, caches, blocks, tails)
    for ours, theirs in zip(moves, expected, strict=True):
        assert torch.equal(ours.data, theirs.data)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(20 if GPU else examples(8, 1)))
def test_what_is_gathered_comes_back_within_half_a_scale(case):
    moves, caches, blocks, _ = loud_case(random.randrange(10**6))
    before = copies(caches)
    moves = [empty(move, caches, WHOLE)._replace(old=move.new) for move in moves]  # nothing turns
    gather(moves, caches, blocks)
    for layer in caches.layers:
        layer.zero_()
    scatter(moves, caches, blocks)
    covered = torch.tensor([position for move in moves for position in range(move.new, move.new + move.tokens)])
    rows, slots = torch.tensor(blocks)[covered // caches.block_size], covered % caches.block_size
    rounding = torch.finfo(caches.layers[0].dtype).eps
    for ours, theirs in zip(caches.layers, before.layers, strict=True):
        for part in (slice(0, caches.k_dim), slice(caches.k_dim, None)):
            read, wanted = (cache[rows, :, slots][..., part].double() for cache in (ours, theirs))
            for one, other in zip(read.split(64, dim=-1), wanted.split(64, dim=-1), strict=True):
                largest = other.abs().amax(-1, keepdim=True)
                assert ((one - other).abs() <= largest * (1 / 253 + rounding)).all()


@pytest.mark.parametrize("case", range(20 if GPU else examples(8, 1)))
def test_layers_arrive_group_by_group_with_all_entries(case):
    """Entries in 8 bits and others have separate launches, and a layer has arrived only after both."""
    moves, caches, blocks, first = mixed_case(random.randrange(10**6))
    before, expected = copies(caches), copies(caches)
    scatter_reference(moves, expected, blocks, first)
    groups = [range(layer, layer + 1) for layer in range(len(caches.layers))]
    seen = []
    for group in scatter_slowly(moves, caches, blocks, first, WHOLE, groups):
        seen.append(group)
        for index, layer in enumerate(caches.layers):
            wanted = (expected if index < group.stop else before).layers[index]
            torch.testing.assert_close(layer, wanted, rtol=0.02, atol=0.02)
    assert seen == groups


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("take", [gather, gather_reference])
def test_a_row_that_is_not_finite_reads_as_nan(bad, take):
    moves, caches, blocks, _ = random_case(3)
    move = empty(moves[0], caches, WHOLE)._replace(new=0)
    block, slot = blocks[0], 0
    caches.layers[0][block, 0, slot, caches.k_dim - 1] = bad
    take([move], caches, blocks)
    k, v = PackedKV(move.data, caches.format(WHOLE, is_int8=True), move.tokens).layer(0)
    last = slice((caches.k_dim - 1) // 64 * 64, None)
    assert k[0, 0, last].isnan().all()
    assert k[0, 0, : last.start].isfinite().all()
    assert k[0, 1:].isfinite().all()
    assert v.isfinite().all()


@pytest.mark.parametrize("change", ["fewer heads", "no scales", "more numbers", "not contiguous"])
@pytest.mark.parametrize("move_all", [scatter, scatter_reference, gather, gather_reference])
def test_an_entry_of_other_sizes_is_refused(change, move_all):
    moves, caches, blocks, _ = random_case(5)
    right = empty(moves[0], caches, WHOLE)
    numbers = len(caches.layers) * right.tokens * (caches.k_dim + caches.v_dim)
    wrong = {
        "fewer heads": right.data[: caches.heads - 1],
        "no scales": right.data[:, :numbers].contiguous(),
        "more numbers": torch.cat([right.data, right.data], dim=1),
        "not contiguous": torch.cat([right.data, right.data], dim=1)[:, ::2],
    }[change]
    with pytest.raises(ValueError, match="an entry of"):
        move_all([right._replace(data=wrong)], caches, blocks)
    move_all([right], caches, blocks)


def test_windowed_entries_in_8_bits_are_scattered():
    for seed in range(examples(3, 1)):
        moves, caches, blocks, first = loud_case(seed)
        tails = WindowTails(tuple(range(0, len(caches.layers), 2)), 17)
        whole = [empty(move, caches, tails) for move in moves]
        gather_reference(whole, caches, blocks, tails)
        expected = copies(caches)
        scatter_reference(whole, expected, blocks, first, tails)
        scatter(whole, caches, blocks, first, tails)
        for ours, theirs in zip(caches.layers, expected.layers, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
        assert isinstance(whole[0], Move)
