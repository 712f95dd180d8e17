"""The differentiated computation is that of engines: its numbers are compared with the embedded engine, its gradients
with slopes."""

import random

import pytest
import torch

from kvmosaic.blend.base import Selection
from kvmosaic.core.entry import PackedKV
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.hf.model import HFModel
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.engines.self_test import trial_entry
from kvmosaic.eval.metrics import kl_per_token
from kvmosaic.tune.base import TrainingPrompt
from kvmosaic.tune.student import Distillation
from tests.engines.hf.tiny import LIMIT, SUPPORTED, VOCABULARY, make

SINK = 9
"""Number of tokens of the sink."""


@pytest.fixture(scope="module", params=SUPPORTED)
def engine(request):
    return HFModel(make(request.param, random.randrange(2**31)))


def random_tokens(count):
    return [random.randrange(3, VOCABULARY) for _ in range(count)]


def random_prompt(longest):
    """A prompt with chunks of any length, and text before, between and behind them."""
    tokens, chunks = random_tokens(random.randint(1, 4)), []
    while not chunks or (len(tokens) < longest - 20 and random.random() < 0.7):
        start = len(tokens)
        tokens += random_tokens(random.randint(1, 14))
        chunks.append(Span(start, len(tokens)))
        tokens += random_tokens(random.randint(0, 2))
    tokens += random_tokens(random.randint(2, 6))
    return TrainingPrompt(tuple(tokens), tuple(chunks), Span(len(tokens) - 2, len(tokens)), "random")


def random_sink(engine):
    """Random numbers, as large as those of tokens."""
    [(k, v)] = engine.fill((), [random_tokens(SINK)], LIMIT - 1)
    return tuple(part.clone() + 0.1 * part.std() * torch.randn_like(part) for part in (k, v))


def some_positions(prompt):
    return [position for span in prompt.chunks for position in span.positions if random.random() < 0.3]


def by_engine(engine, prompt, sink, recomputed):
    """KL after the compared tokens, as the embedded engine serves the prompt."""
    length = len(prompt.tokens)
    chunked = ChunkedPrompt(prompt.tokens, prompt.chunks)
    chunks = [chunked.tokens_of(span) for span in prompt.chunks]
    full = engine.plain_logits(prompt.tokens, len(prompt.compared), 0)
    with engine.session():
        kv = RequestKV(engine.format, length, engine.model.device)
        filled = engine.fill((), chunks, length, sink=sink)
        for span, chunk, own in zip(prompt.chunks, chunks, filled, strict=True):
            engine.remap(trial_entry(chunk, (0,) * SINK, PackedKV.of(*own, engine.format)), kv, span.start, length)
        logits = engine.blend(chunked, Selection(tuple(recomputed)), kv, length, len(prompt.compared))
    return torch.tensor(kl_per_token(full, logits))


def test_a_batch_says_what_the_engine_says_of_each_prompt(engine):
    prompts = [random_prompt(LIMIT - SINK - 16) for _ in range(3)]
    sink, recomputed = random_sink(engine), [some_positions(prompt) for prompt in prompts]
    with engine.session(gradients=True), torch.no_grad():
        ours = Distillation(engine).divergence(prompts, sink, recomputed)
    for prompt, positions, kl in zip(prompts, recomputed, ours, strict=True):
        torch.testing.assert_close(kl, by_engine(engine, prompt, sink, positions), rtol=2e-2, atol=2e-6)


def test_answers_are_those_of_the_model_alone(engine):
    """Prompts in the batch have different lengths. An answer ends with its first end token."""
    prompts, most = [random_prompt(LIMIT - SINK - 40) for _ in range(3)], 6
    wanted = []
    for prompt in prompts:
        tokens = list(prompt.tokens)
        for _ in range(most):
            tokens.append(int(engine.plain_logits(tokens, 1, 0)[-1].argmax()))
        wanted.append(tokens)
    end = wanted[0][len(prompts[0].tokens) + 2]
    for ends in (None, [end]):
        engine.model.generation_config.eos_token_id = ends
        with engine.session():
            answered = Distillation(engine).answered(prompts, most)
        for prompt, tokens, ours in zip(prompts, wanted, answered, strict=True):
            answer = tokens[len(prompt.tokens) :]
            if ends and end in answer:
                answer = answer[: answer.index(end) + 1]
            assert list(ours.tokens[len(prompt.tokens) :]) == answer
            assert (ours.chunks, ours.compared.start) == (prompt.chunks, prompt.compared.start)
            assert ours.compared.end == len(ours.tokens) - 1


def test_nothing_reused_is_a_full_prefill(engine):
    prompt = random_prompt(LIMIT - SINK - 16)
    everything = [position for span in prompt.chunks for position in span.positions]
    with engine.session(gradients=True), torch.no_grad():
        [kl] = Distillation(engine).divergence([prompt], random_sink(engine), [everything])
    assert kl.abs().max() < 1e-6


@pytest.mark.slow
def test_gradients_are_slopes(engine):
    """Slopes are taken along a direction near the gradient, in K and in V."""
    prompts = [random_prompt(LIMIT - SINK - 16) for _ in range(2)]
    recomputed = [some_positions(prompt) for prompt in prompts]
    sink = [part.requires_grad_() for part in random_sink(engine)]
    distillation = Distillation(engine)

    def loss(*parts):
        with engine.session(gradients=True):
            return torch.cat(distillation.divergence(prompts, parts, recomputed)).sum()

    def slopes(part, direction, step):
        """Slopes to either side, and across both."""
        found = []
        for sign in (1, 0, -1):
            parts = [each.detach() for each in sink]
            parts[part] = parts[part] + sign * step * direction
            with torch.no_grad():
                found.append(float(loss(*parts)))
        ahead, here, behind = found
        return [(ahead - here) / step, (here - behind) / step, (ahead - behind) / (2 * step)]

    loss(*sink).backward()
    for part in (0, 1):
        gradient = sink[part].grad
        size, direction = float(sink[part].detach().norm()), gradient / gradient.norm()
        # Long steps suffer from curvature, short ones from rounding. If a token is about to go to
        # another expert, the loss jumps to one side, so the slope to the other side counts as well.
        steps = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
        found = [each for step in steps for each in slopes(part, direction, step * size)]
        nearest = min(found, key=lambda each: abs(each - float(gradient.norm())))
        assert nearest == pytest.approx(float(gradient.norm()), rel=0.1)
