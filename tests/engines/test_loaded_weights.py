"""Weights are identified by some pieces of every tensor."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.engines.loaded_weights import PIECE_BYTES, sampled_digest

SAMPLE = 4096


def tensors():
    """Tensors of all kinds: small and large, transposed, of odd types, without elements."""
    return {
        "norm": torch.randn(96),
        "scalar": torch.tensor(3.0),
        "matrix": torch.randn(130, 257),
        "transposed": torch.randn(64, 500).t(),
        "half": torch.randn(400, 70).bfloat16(),
        "eight": torch.randn(300, 50).to(torch.float8_e4m3fn),
        "flags": torch.rand(9000) > 0.5,
        "complex": torch.randn(50, 60, dtype=torch.complex64),
        "packed": torch.empty(0),
    }


def digest(some):
    return sampled_digest(some.items(), SAMPLE)


def test_copies_are_the_same_and_other_names_shapes_and_types_are_not():
    some = tensors()
    assert digest(some) == digest({name: tensor.clone() for name, tensor in some.items()})
    for other in (
        {**some, "more": torch.zeros(1)},
        {name: tensor for name, tensor in some.items() if name != "norm"},
        {name.replace("norm", "other"): tensor for name, tensor in some.items()},
        {**some, "norm": some["norm"].view(8, 12)},
        {**some, "norm": some["norm"].view(torch.int32)},
    ):
        assert digest(other) != digest(some)


@pytest.mark.parametrize("name", [name for name, tensor in tensors().items() if tensor.numel()])
def test_a_tensor_that_changes_everywhere_is_seen(name):
    some = tensors()
    before = digest(some)
    changed = some[name].data
    changed.copy_(
        ~changed if changed.dtype == torch.bool else (changed.to(torch.complex64) * 1.5 + 1).to(changed.dtype)
    )
    assert digest(some) != before


def test_a_few_hundredths_of_a_large_matrix_are_enough():
    """The share of numbers that a small training step changes in bfloat16."""
    some = {"matrix": torch.randn(1000, 1000).bfloat16()}
    before = digest(some)
    changed = torch.rand(1000, 1000) < 0.02
    some["matrix"][changed] += 1
    assert digest(some) != before


@pytest.mark.parametrize("part", range(SAMPLE // PIECE_BYTES))
def test_wherever_a_large_matrix_changes(part):
    """A change in any of the equal parts is noticed, one for each piece."""
    some = {"matrix": torch.randn(1000, 1000)}
    before = digest(some)
    some["matrix"].chunk(SAMPLE // PIECE_BYTES)[part].add_(1)
    assert digest(some) != before


@given(st.integers(1, 40_000), st.integers(1, 40))
def test_sizes_of_all_kinds(size, pieces):
    tensor = torch.arange(size, dtype=torch.int32)
    taken = sampled_digest([("a", tensor)], pieces * PIECE_BYTES)
    assert taken == sampled_digest([("a", tensor.clone())], pieces * PIECE_BYTES)
    assert taken != sampled_digest([("a", tensor + 1)], pieces * PIECE_BYTES)
    if 4 * size <= pieces * PIECE_BYTES:  # all of it is looked at
        tensor[random.randrange(size)] -= 1
        assert taken != sampled_digest([("a", tensor)], pieces * PIECE_BYTES)


def test_nothing_to_look_at_says_nothing():
    assert sampled_digest([], SAMPLE) is None
    assert sampled_digest([("packed", torch.empty(0)), ("later", torch.empty(4, device="meta"))], SAMPLE) is None
