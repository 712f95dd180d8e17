"""How policies spend their budget, on random prompts and scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic.blend import Selection, choose, policy_named
from kvmosaic.blend.base import Check, Policy
from kvmosaic.blend.kv_deviation import whole_documents
from kvmosaic.blend.query_attention import middle_layers
from kvmosaic.blend.sink_link import first_tokens
from kvmosaic.blend.spans import best_spans
from kvmosaic.core.errors import KvmosaicError
from tests.blend.drawn import SPECS, Drawn, prompts


@settings(max_examples=300, deadline=None)
@given(prompts(), st.sampled_from(SPECS), st.floats(0.01, 0.99))
def test_a_choice_is_chunk_tokens_in_order_within_the_ratio(prompt, spec, ratio):
    policy = policy_named(spec)
    selection = choose(policy, prompt, ratio)
    inside = {position for span in prompt.prompt.chunks for position in span.positions}
    assert set(selection.positions) <= inside, f"{spec} chose tokens that are in no chunk"
    assert list(selection.positions) == sorted(set(selection.positions)), f"{spec} chose tokens out of order"
    spent = selection.layer_tokens(prompt.num_layers)
    allowed = ratio * prompt.num_layers * prompt.chunk_tokens
    assert prompt.charged <= allowed + 1e-6, f"{spec} probed, although the probe costs more than the ratio allows"
    if policy.keeps_ratio:
        assert spent + prompt.charged <= allowed + 1e-6, f"{spec} spent more than the ratio allows"
    if spec in ("random", "sink-link", "composite"):
        assert allowed - prompt.charged - spent < prompt.num_layers, f"{spec} left a part of its budget"


class Astray(Policy):
    """Picks given positions."""

    name = "astray"

    def __init__(self, *positions):
        self.positions = positions

    def select(self, assembled, ratio):
        return Selection(self.positions)


@given(prompts(), st.data())
def test_tokens_outside_chunks_are_refused_in_one_line(prompt, data):
    length = len(prompt.prompt.token_ids)
    position = data.draw(st.integers(-3, length + 5))
    if any(span.start <= position < span.end for span in prompt.prompt.chunks):
        assert choose(Astray(position), prompt, 0.5).positions == (position,)
    else:
        with pytest.raises(KvmosaicError, match=f"astray: select returned position {position}, .*no chunk") as error:
            choose(Astray(position), prompt, 0.5)
        assert "\n" not in str(error.value)


@given(prompts(), st.data())
def test_tokens_out_of_order_are_refused_in_one_line(prompt, data):
    inside = st.sampled_from(prompt.positions().tolist())
    positions = data.draw(st.lists(inside, min_size=2, max_size=5))
    if positions == sorted(set(positions)):
        assert choose(Astray(*positions), prompt, 0.99).positions == tuple(positions)
    else:
        with pytest.raises(KvmosaicError, match=r"astray: .*not ascending") as error:
            choose(Astray(*positions), prompt, 0.99)
        assert "\n" not in str(error.value)


@given(prompts(), st.floats(0.01, 0.99), st.integers(1, 360))
def test_a_budget_that_is_exceeded_is_refused_in_one_line(prompt, ratio, count):
    """By one token it may be, because tokens are whole."""
    chosen = Astray(*prompt.positions()[:count].tolist())
    if len(chosen.positions) <= ratio * prompt.chunk_tokens + 1:
        assert choose(chosen, prompt, ratio).positions == chosen.positions
    else:
        with pytest.raises(KvmosaicError, match=rf"astray: .*the ratio allows {ratio:.0%}") as error:
            choose(chosen, prompt, ratio)
        assert "\n" not in str(error.value)


def test_probes_are_part_of_the_budget():
    class Prober(Astray):
        reads_content = True

        def probes(self, assembled, ratio):
            return True

        def select(self, assembled, ratio):
            assembled.deviation(7, "k")
            return super().select(assembled, ratio)

    prompt = Drawn([10, 10], system=3, question=5, layers=10, full=[0, 1, 2, 3], seed=0)
    with pytest.raises(KvmosaicError, match=r"astray: .*with its probes, cost 80%"):
        choose(Prober(), prompt, 0.5)


@pytest.mark.parametrize("reads_content", [False, True])
@pytest.mark.parametrize("announces", [False, True])
def test_a_probe_has_to_be_announced(reads_content, announces):
    """Otherwise vLLM's prefix cache would mix up questions, or the probe would come too early."""

    class Prober(Astray):
        def probes(self, assembled, ratio):
            return announces

        def select(self, assembled, ratio):
            assembled.deviation(0, "k")
            return Selection()

    Prober.reads_content = reads_content
    prompt = Drawn([10, 10], system=3, question=5, layers=10, full=[0, 1, 2, 3], seed=0)
    if reads_content and announces:
        assert choose(Prober(), prompt, 0.5) == Selection()
    else:
        with pytest.raises(KvmosaicError, match=r"astray: .*probed") as error:
            choose(Prober(), prompt, 0.5)
        assert "\n" not in str(error.value)


@given(prompts(), st.integers(0, 400), st.integers(1, 33), st.randoms())
def test_best_spans(prompt, count, width, lot):
    scores = torch.tensor([lot.random() for _ in range(prompt.chunk_tokens)])
    chosen = best_spans(scores, prompt, count, width)
    assert int(chosen.sum()) == min(count, prompt.chunk_tokens)
    begin, means = 0, []
    for span in prompt.prompt.chunks:
        for start in range(begin, begin + len(span), width):
            end = min(start + width, begin + len(span))
            means.append((float(scores[start:end].mean()), float(chosen[start:end].float().mean())))
        begin += len(span)
    whole = [mean for mean, share in means if share == 1]
    none = [mean for mean, share in means if share == 0]
    assert sum(0 < share < 1 for _, share in means) <= 1
    assert not whole or not none or min(whole) >= max(none) - 1e-6


@given(prompts(), st.integers(0, 400), st.integers(1, 33), st.randoms())
def test_given_tokens_come_first(prompt, count, width, lot):
    scores = torch.tensor([lot.random() for _ in range(prompt.chunk_tokens)])
    given = torch.tensor([lot.random() < 0.2 for _ in range(prompt.chunk_tokens)])
    chosen = best_spans(scores, prompt, count, width, given)
    assert int(chosen.sum()) == min(count, prompt.chunk_tokens)
    assert bool((given & ~chosen).any()) == (int(given.sum()) > count)
    if int(given.sum()) < count:
        assert (chosen | ~best_spans(scores, prompt, count - int(given.sum()), width)).all()


@given(prompts(), st.integers(0, 400))
def test_first_tokens(prompt, count):
    chosen = first_tokens(prompt, count)
    assert int(chosen.sum()) == min(count, prompt.chunk_tokens)
    begin, taken = 0, []
    for span in prompt.prompt.chunks:
        mine = chosen[begin : begin + len(span)]
        assert mine[: int(mine.sum())].all()
        taken.append((int(mine.sum()), len(span)))
        begin += len(span)
    most = max(number for number, _ in taken)
    assert all(number in (most, most - 1, length) for number, length in taken)


@given(prompts(), st.integers(0, 400), st.randoms())
def test_whole_documents(prompt, count, lot):
    scores = torch.tensor([lot.random() for _ in range(prompt.chunk_tokens)])
    chosen = whole_documents(scores, prompt, count)
    assert int(chosen.sum()) == min(count, prompt.chunk_tokens)


@given(prompts(), st.integers(1, 6))
def test_middle_layers(prompt, count):
    layers = middle_layers(prompt, count)
    assert len(layers) <= count
    assert set(layers) <= set(prompt.full_layers)
    assert bool(layers) == bool(prompt.full_layers)


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=3))
def test_layer_tokens_of_shrinking_sets(rows, steps):
    checks, layer = [], -1
    for gap, keep in steps:
        layer += gap + 1
        checks.append(Check(layer, keep, "k"))
    layers = layer + 3
    alive, total = rows, 0
    for index in range(layers):
        total += alive
        alive = min([alive, *(check.keep for check in checks if check.layer == index)])
    assert Selection(tuple(range(rows)), tuple(checks)).layer_tokens(layers) == total
