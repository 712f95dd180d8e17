"""The rotation of keys is measured on a real model, also in half precision."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.core.rotation import CosSin, RotaryColumns
from kvmosaic.engines.rotary import explain_layer
from kvmosaic.hf import LLM
from tests.half_precision import fast_products

TOKENS = range(3, 15)
"""Hardly trained tokens, which magnify rounding errors: half of the rows behind them differ by tens of percent."""
OLD, NEW = range(len(TOKENS)), range(29, 29 + len(TOKENS))


@pytest.fixture(scope="module")
def engine(smollm2_folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.bfloat16).eval()
    with fast_products():
        yield LLM(model, tokenizer, enable_chunk_cache=True).engine


@pytest.fixture(scope="module")
def layers(engine):
    """K and V of every layer, at both places."""
    with engine.session():
        captured = [engine._capture([list(TOKENS)], place.start, NEW.stop) for place in (OLD, NEW)]
    at_old, at_new = (kv.row(0, slice(0, len(TOKENS))) for kv in captured)
    return [tuple((k[:, layer], v[:, layer]) for k, v in (at_old, at_new)) for layer in range(engine.format.layers)]


def explain(layer, rows, tables):
    return explain_layer(layer, *rows, OLD, NEW, tables)


def refused(layer, rows, tables):
    with pytest.raises(UnsupportedModelError, match=f"keys of layer {layer} do not move"):
        explain(layer, rows, tables)


@pytest.mark.slow
def test_bfloat16_is_explained_in_every_layer(engine, layers):
    [table] = engine._tables
    width = engine.format.k_dim
    for layer, rows in enumerate(layers):
        found = explain(layer, rows, [table])
        assert found is not None
        assert (found.table, found.columns) == (table, RotaryColumns("k", 0, width, False))


def test_noise_is_as_large_as_the_test_says(layers):
    """Otherwise this model, or torch, no longer shows the case that the rule is for."""
    noise = [float((old[1] - new[1]).float().norm() / new[1].float().norm()) for old, new in layers]
    assert max(noise) > 0.05


@pytest.mark.parametrize("wrong", ["pairing", "table", "sign", "position", "learned"])
def test_wrong_turns_are_refused_in_every_layer(engine, layers, wrong):
    tables = engine._tables
    if wrong == "table":
        tables = [Changed(tables[0], lambda cos, sin: (cos.flip(-1), sin.flip(-1)))]
    elif wrong == "sign":
        tables = [Changed(tables[0], lambda cos, sin: (cos, -sin))]
    for layer, (old, new) in enumerate(layers):
        k_old, k_new, v_new = old[0], new[0], new[1]
        if wrong == "pairing":  # neither halves nor neighbours
            shuffled = torch.randperm(k_old.shape[-1], generator=torch.Generator().manual_seed(layer))
            k_old, k_new = k_old[..., shuffled], k_new[..., shuffled]
        elif wrong == "position":  # as if one further on
            k_new = k_new.roll(1, dims=1)
        elif wrong == "learned":  # positions that are part of the input move values, too
            v_new = v_new + 0.2 * v_new.norm() / v_new.numel() ** 0.5
        refused(layer, ((k_old, old[1]), (k_new, v_new)), tables)


class Changed:
    """A rotary table, made wrong."""

    def __init__(self, table, change):
        self.table, self.change = table, change

    def rows(self, positions, sequence_length):
        return CosSin(*self.change(*self.table.rows(positions, sequence_length)))


@pytest.mark.parametrize("layer", [0, 1])
def test_rows_of_other_inputs_are_passed_over_below_the_first_layer(engine, layers, layer):
    """The first layer has the same input at both places, so differences there are not due to rounding."""
    (k_old, v_old), (k_new, v_new) = layers[layer]
    k_new, v_new = k_new.clone(), v_new.clone()
    k_new[:, 5:] *= 1.5
    v_new[:, 5:] *= 1.5
    rows = (k_old, v_old), (k_new, v_new)
    if layer == 0:
        refused(layer, rows, engine._tables)
    else:
        assert explain(layer, rows, engine._tables) is not None


def test_keys_of_known_inputs_must_turn_however_noisy_others_are(engine, layers):
    (k_old, v_old), (k_new, v_new) = layers[1]
    k_new, v_new = k_new.clone(), v_new.clone()
    v_new[:, 5:] *= 1.5
    k_new[:, 4] *= 1.5
    refused(1, ((k_old, v_old), (k_new, v_new)), engine._tables)


def test_a_layer_without_positions_needs_no_turn(engine, layers):
    for layer, ((k, v), (_, v_new)) in enumerate(layers):
        assert explain(layer, ((k, v), (k, v_new)), engine._tables) is None


def test_single_precision_stays_strict(engine, layers):
    """Every row counts, to a thousandth."""
    (k_old, v_old), _ = layers[1]
    k_old, v_old = k_old.float(), v_old.float()
    v_new = v_old.clone()
    assert explain(1, ((k_old, v_old), (k_old, v_new)), engine._tables) is None
    v_new[:, 5:] *= 1.01
    refused(1, ((k_old, v_old), (k_old, v_new)), engine._tables)
