"""Measures what a transformers model caches, and how its keys turn."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.engines.hf.request_kv import CapturedKV
from kvmosaic.engines.rotary import LayerRotary, RotaryTable, explain_layer

Capture = Callable[[Sequence[Sequence[int]], int, int], CapturedKV]
"""Computes rows of tokens from a position on, with the tables of a prompt of some length, and records their KV."""


def measure(
    model: PreTrainedModel, tables: Sequence[RotaryTable], capture: Capture, max_positions: int | None
) -> tuple[KVFormat, list[LayerRotary | None]]:
    """Compute the same tokens at two positions and explain the differences, layer by layer. Raises
    :class:`UnsupportedModelError` if there is no explanation."""
    tokens = _tokens(model, max_positions)
    shift = min(29, (max_positions or 64) // 2)
    old, new = range(len(tokens)), range(shift, shift + len(tokens))
    try:
        at_old, at_new = (capture([tokens], place.start, new.stop) for place in (old, new))
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not accept our cache ({type(error).__name__}: {error}); "
            "only models that keep nothing but keys and values per token can reuse chunks"
        ) from error
    layers = sorted(at_old.captured)
    shapes = {(k.shape[1], k.shape[3], v.shape[3], k.dtype) for k, v in at_old.captured.values()}
    expected = model.config.get_text_config().num_hidden_layers
    if layers != list(range(expected)) or len(shapes) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} caches {len(layers)} of {expected} layers in {len(shapes)} shapes; "
            "every layer must cache keys and values of one shape"
        )
    heads, k_dim, v_dim, dtype = shapes.pop()
    inside = slice(0, len(tokens))
    before, after = at_old.row(0, inside), at_new.row(0, inside)
    rotary = [
        explain_layer(
            layer,
            (before[0][:, layer], before[1][:, layer]),
            (after[0][:, layer], after[1][:, layer]),
            old,
            new,
            tables,
        )
        for layer in layers
    ]
    return KVFormat(len(layers), heads, k_dim, v_dim, dtype), rotary


def _tokens(model: PreTrainedModel, max_positions: int | None) -> list[int]:
    count = min(12, (max_positions or 64) // 2)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0)).tolist()
