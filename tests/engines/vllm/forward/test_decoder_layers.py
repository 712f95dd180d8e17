"""The decoder layers of a model are found by what happens when it runs, whatever they are called."""

import random

import pytest
import torch

from kvmosaic.engines.vllm.forward.decoder_layers import measure_layers

LAYERS, WIDTH = 3, 3
"""The width is also a number of tokens that is measured with."""


class Layer(torch.nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *args, **kwargs):
        return self.attend(args, kwargs)


class Model(torch.nn.Module):
    """Its layers are called by ``call`` with a layer, the hidden states, positions and the residual."""

    def __init__(self, call, count=LAYERS, calls=1) -> None:
        super().__init__()
        self.other = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(count)])
        self.layers = torch.nn.ModuleList([Layer(lambda a, k, i=i: self.attended(i)) for i in range(count)])
        self.call, self.calls, self.attended = call, calls, None

    def forward(self, tokens: int) -> None:
        hidden, residual = torch.zeros(tokens, WIDTH), None
        for other in self.other:  # another list, which does not run in turns with attention
            other(hidden)
        for layer in self.layers:
            for _ in range(self.calls):
                self.call(layer, hidden, torch.arange(tokens), residual)
            residual = hidden


def measured(model, count=LAYERS):
    def compute(tokens, attended):
        model.attended = attended
        model(tokens)

    found = measure_layers(model, count, compute)
    assert not any(module._forward_pre_hooks for module in model.modules())
    return found


CALLS = {
    "llama": lambda layer, hidden, positions, residual: layer(positions, hidden, residual),
    "keywords": lambda layer, hidden, positions, residual: layer(
        hidden_states=hidden, residual=residual, p=positions
    ),
    "hidden only": lambda layer, hidden, positions, residual: layer(hidden),
    "transformers": lambda layer, hidden, positions, residual: layer(
        hidden[None], position_embeddings=(positions[None, :, None].expand(1, -1, WIDTH),) * 2, cache=[None, "x"]
    ),
    "axes of positions": lambda layer, hidden, positions, residual: layer(positions.expand(3, -1), hidden, residual),
    "inputs in front": lambda layer, hidden, positions, residual: layer(hidden.expand(4, -1, -1), positions),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_inputs_are_cut_where_they_have_tokens(call):
    model = Model(call)
    found = measured(model)
    assert found is not None
    count = random.randint(5, 9)
    kept = torch.tensor(sorted(random.sample(range(count), 3)))
    given, cut = [], []

    def enter(layer, args, kwargs):
        given.append((args, kwargs))
        cut.append(found.changed(layer, args, kwargs, lambda tensor, axis: tensor.index_select(axis, kept)))

    model.attended = lambda layer: None
    with found.entering(enter):
        model(count)
    assert len(cut) == LAYERS
    for before, after in zip(given, cut, strict=True):
        check(before, after, count, kept)


def check(before, after, count, kept):
    """Tensors have the kept tokens; everything else is as it was."""
    assert type(before) is type(after)
    if isinstance(before, torch.Tensor):
        [axis] = [axis for axis, size in enumerate(before.shape) if size == count]
        assert torch.equal(after, before.index_select(axis, kept))
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for name, value in before.items():
            check(value, after[name], count, kept)
    elif isinstance(before, (tuple, list)):
        for mine, yours in zip(before, after, strict=True):
            check(mine, yours, count, kept)
    else:
        assert before is after


def flat(layer, hidden, positions, residual):
    layer(hidden.flatten())


def nothing(layer, hidden, positions, residual):
    layer()


def square(layer, hidden, positions, residual):
    layer(hidden, torch.zeros(len(hidden), len(hidden)))


@pytest.mark.parametrize(
    "model",
    [Model(flat), Model(nothing), Model(square), Model(CALLS["llama"], calls=2), Model(CALLS["llama"], count=4)],
    ids=["tokens in one row with numbers", "no inputs", "masks", "layers that run twice", "other layers"],
)
def test_layers_that_cannot_be_cut_are_not_found(model):
    assert measured(model) is None
