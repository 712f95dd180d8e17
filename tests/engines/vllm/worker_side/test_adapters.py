"""Workers distinguish adapters by every number, and by the place where it is applied."""

import pytest
import torch

from kvmosaic.engines.vllm.worker_side.adapters import weights_digest


def weights(**changes):
    chance = torch.Generator().manual_seed(0)
    named = {
        "q.lora_a": torch.randn(4, 6, generator=chance),
        "q.lora_b": torch.randn(6, 4, generator=chance).bfloat16(),
        "q.scaling": "1.0",
    }
    return (named | changes).items()


def test_the_same_weights_have_the_same_digest():
    turned = dict(weights())["q.lora_a"].T.contiguous().T  # the same numbers in another order in memory
    assert not turned.is_contiguous()
    assert weights_digest(weights()) == weights_digest(weights(**{"q.lora_a": turned}))
    assert len(weights_digest(weights())) == 32


@pytest.mark.parametrize("which", ["q.lora_a", "q.lora_b"])
def test_every_number_counts(which):
    seen = {weights_digest(weights())}
    for index in range(24):
        changed = dict(weights())[which].clone()
        changed.view(-1)[index] += 1
        seen.add(weights_digest(weights(**{which: changed})))
    assert len(seen) == 25


@pytest.mark.parametrize(
    "changes",
    [
        {"q.lora_a": dict(weights())["q.lora_a"].reshape(6, 4)},
        {"q.lora_a": dict(weights())["q.lora_a"].view(torch.int32)},
        {"q.scaling": "2.0"},
        {"q.lora_a": "None"},
        {"k.lora_a": torch.zeros(0)},
    ],
    ids=["shape", "dtype", "scaling", "left-out", "more"],
)
def test_so_does_everything_else(changes):
    assert weights_digest(weights(**changes)) != weights_digest(weights())


def test_names_count():
    renamed = [(name.replace("q.", "v."), value) for name, value in weights()]
    assert weights_digest(renamed) != weights_digest(weights())
