"""How policies spend their budget, on random prompts and scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmosaic.blend import AssembledPrompt, Selection, choose, policy_named
from kvmosaic.blend.base import Check, Policy
from kvmosaic.blend.kv_deviation import whole_documents
from kvmosaic.blend.query_attention import middle_layers
from kvmosaic.blend.sink_link import first_tokens
from kvmosaic.blend.spans import best_spans
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.prompt import ChunkedPrompt, Span


class Drawn(AssembledPrompt):
    """A prompt whose probes give random numbers."""

    def __init__(self, lengths, system, question, layers, full, seed):
        spans, at = [], system
        for length in lengths:
            spans.append(Span(at, at + length))
            at += length
        prompt = ChunkedPrompt(tuple(range(at + question)), tuple(spans))
        super().__init__(prompt, prompt.question, layers, full)
        self.lot = torch.Generator().manual_seed(seed)

    def question_attention(self, layers):
        assert list(layers) == sorted(set(layers))
        assert set(layers) <= set(self.full_layers)
        self.charged += len(self.asked) * (layers[-1] + 1)
        weights = torch.rand(self.chunk_tokens, generator=self.lot)
        return weights / weights.sum()

    def deviation(self, layer, part):
        self.charged += self.chunk_tokens * (layer + 1)
        return torch.rand(self.chunk_tokens, generator=self.lot)


@st.composite
def prompts(draw):
    layers = draw(st.integers(10, 40))
    full = [layer for layer in range(layers) if draw(st.booleans())]
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    return Drawn(
        lengths, draw(st.integers(0, 20)), draw(st.integers(1, 300)), layers, full, draw(st.integers(0, 2**31))
    )


SPECS = st.sampled_from(
    ["random", "sink-link", "sink-link(k=3)", "query-attention", "query-attention(span=1)", "composite",
     "composite(asking=1)", "composite(first=0, asking=1)", "composite(first=9, runs=3, reach=0.5)",
     "kv-deviation", "kv-deviation(unit=document)",
     "kv-deviation(part=v, layers=0+3+7)", "kv-deviation(threshold=1.5)"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(prompts(), SPECS, st.floats(0.01, 0.99))
def test_a_choice_is_chunk_tokens_in_order_within_the_ratio(prompt, spec, ratio):
    selection = choose(policy_named(spec), prompt, ratio)
    inside = {position for span in prompt.prompt.chunks for position in span.positions}
    assert set(selection.positions) <= inside
    assert list(selection.positions) == sorted(set(selection.positions))
    spent = selection.layer_tokens(prompt.num_layers)
    allowed = ratio * prompt.num_layers * prompt.chunk_tokens
    assert spent + prompt.charged <= max(allowed, prompt.charged) + 1e-6
    assert prompt.charged <= allowed + 1e-6  # no probe if it costs more than the budget
    if spec in ("random", "sink-link", "composite"):
        assert allowed - prompt.charged - spent < prompt.num_layers  # the whole budget is spent


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
        assert choose(Astray(*positions), prompt, 0.5).positions == tuple(positions)
    else:
        with pytest.raises(KvmosaicError, match=r"astray: .*not ascending") as error:
            choose(Astray(*positions), prompt, 0.5)
        assert "\n" not in str(error.value)


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
