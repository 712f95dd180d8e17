"""Results are exact where exactness is promised, on every architecture: fp32, at most 1e-4 off, fresh random
inputs."""

import random
from itertools import pairwise

import pytest
import torch

from kvmosaic.core.mask import ChunkAwareMaskBuilder
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.hf.attention import AttentionPlan, active_plan
from kvmosaic.engines.hf.request_kv import CapturedKV, RequestKV
from kvmosaic.hf import LLM
from tests.engines.hf.tiny import LIMIT, SUPPORTED, VOCABULARY, WINDOW, make
from tests.entries import kv_of

TOLERANCE = 1e-4
FILL_FIRST = {"enable_chunk_cache": True, "miss_policy": "fill-first"}  # nothing is ordinary text


@pytest.fixture(scope="module", params=SUPPORTED)
def llm(request):
    return LLM(make(request.param, random.randrange(2**31)), **FILL_FIRST)


def random_tokens(count):
    return [random.randrange(3, VOCABULARY) for _ in range(count)]


def random_prompt(length):
    """System, three or four chunks (one repeated, one longer than the sliding windows), question."""
    chunks = [random_tokens(random.randint(1, 5)) for _ in range(random.randint(1, 2))]
    chunks += [random_tokens(random.randint(WINDOW + 4, WINDOW + 10)), chunks[0]]
    parts = [random_tokens(random.randint(1, 6)), *chunks]
    parts.append(random_tokens(length - sum(map(len, parts))))
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + len(part))
    spans = [Span(a, b) for a, b in pairwise(edges)]
    return ChunkedPrompt(tuple(token for part in parts for token in part), tuple(spans[1:-1]))


def plain_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0, -1]


def assembled_logits(llm, prompt, ratio):
    with llm.engine.session():
        return llm.assemble(prompt, ratio, room=4).logits


def serves(llm, length):
    """True for all models except dynamic NTK past its limit, where every length has its own rope table."""
    dynamic = (llm.model.config.rope_parameters or {}).get("rope_type") == "dynamic"
    assert llm.chunk_cache.serves(length) == (not dynamic or length <= LIMIT)
    return llm.chunk_cache.serves(length)


@pytest.mark.parametrize("length", [60, 100])
def test_ratio_one_gives_the_logits_of_a_plain_forward(llm, length):
    prompt = random_prompt(length)
    wanted = plain_logits(make_fresh(llm), prompt.token_ids)
    torch.testing.assert_close(assembled_logits(llm, prompt, 1.0), wanted, atol=TOLERANCE, rtol=0)


def make_fresh(llm):
    """The same weights in a fresh model, because no state may leak from earlier requests."""
    fresh = type(llm.model)(llm.model.config).eval()
    fresh.load_state_dict(llm.model.state_dict())
    return fresh


@pytest.mark.parametrize("length", [60, 100])
def test_moved_entry_equals_the_chunk_computed_alone_at_its_destination(llm, length):
    if not serves(llm, length):
        return  # every length has its own rope table; such prompts are served plainly (tested below)
    engine, context = llm.engine, list(llm.chunk_cache.sink)
    chunk = random_tokens(random.randint(WINDOW + 1, 40))
    place = random.randint(len(context), length - len(chunk))
    with engine.session():
        [found] = llm.chunk_cache.find_or_fill([chunk], context, length)
        kv = RequestKV(engine.format, length, llm.model.device)
        engine.remap(found.entry, kv, place, length)
    with engine.session():
        # One more token at the prompt's last position: rope tables that depend on length see that length.
        rows = torch.tensor([[*context, *chunk, 0]])
        positions = torch.arange(place - len(context), place + len(chunk) + 1)
        positions[-1] = length - 1
        alone = CapturedKV()
        with active_plan(AttentionPlan(torch.arange(rows.shape[1]), rows.shape[1])):
            llm.model(input_ids=rows, position_ids=positions[None], past_key_values=alone, use_cache=True)
        k, v = alone.row(0, slice(len(context), len(context) + len(chunk)))
    inside = slice(place, place + len(chunk))
    torch.testing.assert_close(kv.k[:, :, inside].transpose(0, 1), k, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(kv.v[:, :, inside].transpose(0, 1), v, atol=TOLERANCE, rtol=0)


def masked_forward(llm, prompt, mask, positions):
    """The whole prompt in one dense forward of the model, under a mask of which token sees which."""

    class Masked(AttentionPlan):
        def visible(self, rule):
            zero = torch.zeros(1, 1, dtype=torch.long)
            return (mask & rule(zero, zero, positions[:, None], positions[None, :]))[None]

    plan = Masked(torch.arange(len(prompt.token_ids)), len(prompt.token_ids))
    plan.is_plain_causal = False
    captured = CapturedKV()
    with llm.engine.session(), active_plan(plan):
        logits = llm.model(
            input_ids=torch.tensor([prompt.token_ids]),
            position_ids=positions[None],
            past_key_values=captured,
            use_cache=True,
        ).logits[0, -1]
    return logits, captured


@pytest.mark.parametrize("length", [60, 100])
def test_ratio_zero_is_attention_under_the_isolation_mask(llm, length):
    if not serves(llm, length):
        return
    prompt = random_prompt(length)
    ours = LLM(llm.model, **FILL_FIRST, sink_prefix="none")
    mask = ChunkAwareMaskBuilder("alone").build(prompt)
    wanted, _ = masked_forward(ours, prompt, mask, torch.arange(length))
    torch.testing.assert_close(assembled_logits(ours, prompt, 0.0), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("context", ["alone", "system"])
def test_entries_are_what_the_isolation_mask_says(llm, context):
    """All chunks are computed at once at their virtual positions, separated by the mask alone."""
    prompt = random_prompt(60)
    ours = LLM(llm.model, **FILL_FIRST, chunk_context=context, sink_prefix="none")
    before = prompt.tokens_of(prompt.system) if context == "system" else ()
    positions = torch.arange(60)
    for span in prompt.chunks:
        positions[span.start : span.end] = torch.arange(len(before), len(before) + len(span))
    _, captured = masked_forward(ours, prompt, ChunkAwareMaskBuilder(context).build(prompt), positions)
    with ours.engine.session():
        found = ours.chunk_cache.find_or_fill([prompt.tokens_of(span) for span in prompt.chunks], before, 60)
    for span, (entry, _, _) in zip(prompt.chunks, found, strict=True):
        k, v = captured.row(0, slice(span.start, span.end))
        for ours, theirs in zip(kv_of(entry), (k, v), strict=True):
            torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [60, 100])
def test_one_chunk_after_its_system_prompt_is_a_full_prefill(llm, length):
    if not serves(llm, length):
        return
    tokens = tuple(random_tokens(length))
    prompt = ChunkedPrompt(tokens, (Span(7, length - 5),))
    ours = LLM(llm.model, **FILL_FIRST, chunk_context="system")
    for _ in range(2):  # filled, then reused
        wanted = plain_logits(make_fresh(llm), tokens)
        torch.testing.assert_close(assembled_logits(ours, prompt, 0.0), wanted, atol=TOLERANCE, rtol=0)


def test_changing_one_chunk_never_changes_the_entry_of_another(llm):
    """To the last bit, unless the model has experts: an expert computes its tokens of all chunks at once, so the
    number of rows depends on the other chunk, and so does rounding."""
    sizes = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = any(getattr(llm.model.config, name, None) for name in sizes)
    a, other_a, b = random_tokens(20), random_tokens(20), random_tokens(15)
    with llm.engine.session():
        first, second = (llm.engine.fill([1], [x, b], 50)[1] for x in (a, other_a))
        alone = llm.engine.fill([1], [b], 50)[0]
    for together, changed, single in zip(first, second, alone, strict=True):
        torch.testing.assert_close(together, changed, atol=1e-6 if experts else 0, rtol=0)
        torch.testing.assert_close(together, single, atol=1e-5, rtol=0)  # other batch shape, other rounding


def test_decoding_goes_on_like_transformers(llm):
    """Greedy tokens at ratio 1.0 are those of the model's own ``generate``."""
    prompt = random_prompt(LIMIT - 4)  # crosses the length at which some rope tables change
    fresh = make_fresh(llm)
    fresh.generation_config.update(do_sample=False, eos_token_id=None)
    wanted = fresh.generate(torch.tensor([prompt.token_ids]), max_new_tokens=10)[0, len(prompt.token_ids) :]
    llm.model.generation_config.eos_token_id = None
    [ours] = llm.generate(prompt, max_tokens=10, temperature=0, recompute_ratio=1.0)
    [plain] = llm.generate(prompt, max_tokens=10, temperature=0, use_chunk_cache=False)
    assert list(plain.token_ids) == wanted.tolist()
    assert list(ours.token_ids) == wanted.tolist()


def test_a_request_leaves_no_trace_in_the_next(llm):
    """Answers do not depend on earlier requests, even if rope tables grow with the sequence."""
    short, long = random_prompt(50), random_prompt(200)
    before = assembled_logits(llm, short, 0.0)
    llm.generate(long, max_tokens=3, temperature=0)
    llm.generate(long, max_tokens=3, temperature=0, use_chunk_cache=False)
    assert torch.equal(assembled_logits(llm, short, 0.0), before)
