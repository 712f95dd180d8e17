"""The same promises on a real model."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.hf import LLM

TEXT = (
    "You answer briefly. # # The Cormorant connects Port Almery with Sill Island four times a day. # # The bakery on "
    "Lantern Street is owned by Tomas Reed. # # The library is closed on Mondays. # # Who owns the bakery?"
)


pytestmark = pytest.mark.slow
FILL_FIRST = {
    "enable_chunk_cache": True,
    "miss_policy": "fill-first",
    "min_chunk_tokens": 1,
    "chunk_separator": " # # ",
}


@pytest.fixture(scope="module")
def llm(smollm2, tokenizer):
    with LLM(smollm2, tokenizer, **FILL_FIRST) as engine:
        yield engine


def test_ratio_one_is_a_plain_forward(llm, smollm2):
    prompt = llm.parser.parse(TEXT)
    assert len(prompt.chunks) == 3
    with torch.inference_mode():
        wanted = smollm2(torch.tensor([prompt.token_ids])).logits[0, -1]
    for _ in range(2):
        with llm.engine.session():
            ours = llm.assemble(prompt, 1.0).logits
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


def test_answers_are_those_of_transformers(llm, smollm2, tokenizer):
    inputs = tokenizer(TEXT, return_tensors="pt")
    wanted = smollm2.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    for options in ({"recompute_ratio": 1.0}, {"use_chunk_cache": False}):
        [output] = llm.generate(TEXT, max_tokens=12, temperature=0, **options)
        assert list(output.token_ids) == wanted.tolist()
        assert output.text == tokenizer.decode(wanted, skip_special_tokens=True)


@pytest.fixture(scope="module")
def double_precision(smollm2_folder):
    """The model in fp64, including its rotary table: the ideal result of both ways of computing a chunk in fp32."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float64).eval()
    frequencies = model.model.rotary_emb.inv_freq.double()

    def rotary(x, position_ids):
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = rotary
    return model


@pytest.fixture(scope="module")
def without_sink(smollm2, tokenizer):
    with LLM(smollm2, tokenizer, sink_prefix="none", **FILL_FIRST) as engine:
        yield engine


def by_token(error):
    """Size of an error for each token; ``error`` is [heads, layers, tokens, columns]."""
    return error.square().sum(dim=(0, 1, 3)).sqrt()


PLACES = pytest.mark.parametrize("places", [(0, 1), (1, 2), (2, 500), (500, 4000), (8000, 8001)], ids=str)


def exact_kv(double_precision, chunk, place):
    """K and V of a chunk at ``place``, ``[heads, layers, tokens, columns]`` in float64."""
    with torch.inference_mode():
        layers = double_precision(
            torch.tensor([chunk]), position_ids=torch.arange(place, place + len(chunk))[None], use_cache=True
        ).past_key_values.layers
    return [torch.stack([getattr(layer, part)[0] for layer in layers], 1) for part in ("keys", "values")]


@PLACES
def test_moving_alone_adds_nothing_but_rounding(without_sink, double_precision, places):
    """KV of float64 is stored in float32, moved, and compared with float64 at its new place. No attention is computed
    between, which could magnify rounding. An angle, position times frequency, is only as precise as float32."""
    llm = without_sink
    place = random.randrange(*places)
    chunk = [random.randrange(1000, 40000) for _ in range(64)]
    stored = [part.float() for part in exact_kv(double_precision, chunk, 0)]
    entry = ChunkKV.from_kv(llm.chunk_cache.key(chunk, (), 8192), chunk, (), *stored)
    kv = RequestKV(llm.engine.format, 8192, torch.device("cpu"))
    llm.engine.remap(entry, kv, place, 8192)
    step = torch.finfo(torch.float32).eps
    for mine, wanted in zip((kv.k, kv.v), exact_kv(double_precision, chunk, place), strict=True):
        moved = mine[:, :, place : place + 64].transpose(0, 1)
        allowed = wanted.norm(dim=-1, keepdim=True) * step * (8 + place + 64)
        assert ((moved - wanted).abs() <= allowed).all()


@PLACES
def test_an_entry_moved_equals_the_chunk_computed_there(without_sink, double_precision, places):
    """At most 1e-4 off, or no more than the model itself is when it computes the chunk there in fp32: far
    out, fp32 angles (position times frequency) are themselves only good to about 1e-3 in its keys. Tokens differ in
    how much they magnify rounding: the median one is as exact as the model's own, the worst errs at most twice as
    much."""
    llm = without_sink
    place = random.randrange(*places)
    chunk = [random.randrange(1000, 40000) for _ in range(64)]
    inside = slice(place, place + 64)
    with llm.engine.session():
        [found] = llm.chunk_cache.find_or_fill([chunk], (), 8192)
        kv = RequestKV(llm.engine.format, 8192, torch.device("cpu"))
        llm.engine.remap(found.entry, kv, place, 8192)
        there = llm.engine._capture([chunk], place, 8192).row(0, slice(0, 64))
    ours = [part[:, :, inside].transpose(0, 1) for part in (kv.k, kv.v)]
    wanted = exact_kv(double_precision, chunk, place)
    for mine, fp32, fp64 in zip(ours, there, wanted, strict=True):
        allowed = max(1e-4, 2 * float((fp32 - fp64).abs().max()))
        assert float((by_token(mine - fp64) / by_token(fp32 - fp64)).median()) <= 1.2
        assert float((mine - fp64).abs().max()) <= allowed
        assert float((mine[:, 0] - fp32[:, 0]).abs().max()) <= 1e-5  # the first layer sees no attention noise
        if place < 500:
            assert float((mine - fp32).abs().max()) <= allowed


def test_one_chunk_under_its_own_system_prompt_is_exact(smollm2, tokenizer):
    llm = LLM(smollm2, tokenizer, chunk_context="system", **FILL_FIRST)
    tokens = tuple(tokenizer.encode(TEXT))
    prompt = ChunkedPrompt(tokens, (Span(5, len(tokens) - 6),))
    with torch.inference_mode():
        wanted = smollm2(torch.tensor([tokens])).logits[0, -1]
    with llm.engine.session():
        torch.testing.assert_close(llm.assemble(prompt, 0.0).logits, wanted, atol=1e-4, rtol=0)
