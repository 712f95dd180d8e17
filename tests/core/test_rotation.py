"""Moving keys, against rotation done in double precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic.core.rotation import CosSin, RotaryColumns, rotate_, rotation_between


def table(positions, pairs, scale, dtype=torch.float32):
    angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(pairs, dtype=torch.float64) / pairs
    )
    return CosSin((angles.cos() * scale).to(dtype).float(), (angles.sin() * scale).to(dtype).float())


def rotated(x, positions, columns, scale):
    """The plain definition, in fp64: pair by pair as complex numbers."""
    x = x.double().clone()
    pairs = columns.width // 2
    angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(pairs, dtype=torch.float64) / pairs
    )
    part = x[..., columns.start : columns.start + columns.width]
    if columns.interleaved:
        a, b = part[..., 0::2].clone(), part[..., 1::2].clone()
    else:
        a, b = part[..., :pairs].clone(), part[..., pairs:].clone()
    turned = torch.complex(a, b) * torch.polar(torch.full_like(angles, scale), angles)
    if columns.interleaved:
        part[..., 0::2], part[..., 1::2] = turned.real, turned.imag
    else:
        part[..., :pairs], part[..., pairs:] = turned.real, turned.imag
    return x


@settings(max_examples=150, deadline=None)
@given(
    old=st.integers(0, 8000),
    new=st.integers(0, 8000),
    tokens=st.integers(1, 6),
    pairs=st.integers(1, 8),
    pad=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    interleaved=st.booleans(),
    scale=st.sampled_from([1.0, 1.19, 0.707]),
    seed=st.integers(0, 2**31),
)
def test_moved_equals_rotated_there(old, new, tokens, pairs, pad, interleaved, scale, seed):
    columns = RotaryColumns("k", pad[0], 2 * pairs, interleaved)
    x = torch.randn(2, 3, tokens, sum(pad) + 2 * pairs, generator=torch.Generator().manual_seed(seed))
    at_old, at_new = range(old, old + tokens), range(new, new + tokens)
    moved = rotated(x, at_old, columns, scale).float()
    rotate_(moved, rotation_between(table(at_old, pairs, scale), table(at_new, pairs, scale)), columns)
    torch.testing.assert_close(moved.double(), rotated(x, at_new, columns, scale), atol=2e-5, rtol=0)


def test_moving_there_and_back_is_identity():
    columns = RotaryColumns("k", 0, 64, False)
    x = torch.randn(4, 10, 64)
    moved = x.clone()
    for a, b in ((0, 700), (700, 31), (31, 0)):
        rotate_(
            moved,
            rotation_between(table(range(a, a + 10), 32, 1.3), table(range(b, b + 10), 32, 1.3)),
            columns,
        )
    torch.testing.assert_close(moved, x, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_and_rounded_tables(dtype):
    columns = RotaryColumns("k", 0, 64, False)
    x = torch.randn(8, 20, 64)
    old, new = range(5, 25), range(4000, 4020)
    exact_table = table(old, 32, 1.0, dtype), table(new, 32, 1.0, dtype)

    # The keys that the model itself would compute there, with its own rounded table.
    def by_table(rows, at):
        first, second = rows[..., :32], rows[..., 32:]
        return torch.cat([first * at.cos - second * at.sin, second * at.cos + first * at.sin], -1)

    moved = by_table(x, exact_table[0]).to(dtype)
    rotate_(moved, rotation_between(*exact_table), columns)
    wanted = by_table(x, exact_table[1])
    ulp = torch.finfo(dtype).eps
    assert (moved.float() - wanted).abs().max() < 3 * ulp * wanted.abs().max()


def test_tables_of_different_length_regimes():
    """longrope: the old rows come from one table, the new ones from another."""
    columns = RotaryColumns("k", 0, 8, False)
    frequencies = [torch.tensor([1.0, 0.5, 0.25, 0.1]), torch.tensor([0.5, 0.2, 0.1, 0.01])]
    at = [CosSin((p * f)[None].cos(), (p * f)[None].sin()) for p, f in zip((3, 50), frequencies, strict=True)]
    x = torch.zeros(1, 1, 8)
    x[..., :4] = at[0].cos
    x[..., 4:] = at[0].sin  # the key (1, 0) at position 3
    rotate_(x, rotation_between(*at), columns)
    assert math.isclose(float((x[..., :4] - at[1].cos).abs().max()), 0, abs_tol=1e-6)
    assert math.isclose(float((x[..., 4:] - at[1].sin).abs().max()), 0, abs_tol=1e-6)
