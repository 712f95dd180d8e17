"""A learned sink in the embedded engine. A sink with the numbers of a text must give the results of that text."""

import random
from statistics import fmean

import pytest
import torch

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.learned_sink import LearnedSink, SinkAbout
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.hf.chat import chat_prompt, messages_about
from kvmosaic.engines.hf.request_kv import CapturedKV
from kvmosaic.eval.metrics import kl_per_token
from kvmosaic.eval.plan import make_plan
from kvmosaic.eval.synthetic import synthetic
from kvmosaic.hf import LLM
from kvmosaic.models.sink_file import save_sink
from tests.engines.hf.tiny import LIMIT, SUPPORTED, VOCABULARY, make
from tests.entries import kv_of

ABOUT = SinkAbout(model="tiny", kl_before=1, kl_after=1, kvmosaic="x")
SETTINGS = {"enable_chunk_cache": True, "miss_policy": "fill-first", "min_chunk_tokens": 1}


def random_tokens(count):
    return tuple(random.randrange(3, VOCABULARY) for _ in range(count))


def sink_of_tokens(engine, tokens, length=LIMIT - 1):
    [(k, v)] = engine.fill((), [tokens], length)
    return LearnedSink(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(), engine.witness(), ABOUT)


def with_sink(model, path, sink, **more):
    save_sink(sink, path)
    return LLM(model, sink_prefix=f"learned:{path}", **SETTINGS | more)


@pytest.mark.parametrize("name", SUPPORTED)
def test_numbers_of_a_text_give_what_the_text_gives(tmp_path, name):
    model = make(name, random.randrange(2**31))
    plain = LLM(model, sink_prefix="none", **SETTINGS)
    tokens, chunks = random_tokens(11), [random_tokens(random.randint(1, 20)) for _ in range(3)]
    learned = with_sink(model, tmp_path / "sink", sink_of_tokens(plain.engine, tokens))
    cache = learned.chunk_cache
    assert learned.chunk_cache.sink == (-1,) * 11
    for item, (k, v) in zip(
        cache.find_or_fill(chunks, cache.sink, LIMIT - 1), plain.engine.fill(tokens, chunks, LIMIT - 1), strict=True
    ):
        for ours, theirs in zip(kv_of(item.entry), (k, v), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_keys_depend_on_every_number(tmp_path):
    model = make("llama", 1)
    plain = LLM(model, sink_prefix="none", **SETTINGS)
    sink, chunk, keys = sink_of_tokens(plain.engine, random_tokens(9)), random_tokens(20), set()
    for number in range(3):
        sink.k.view(-1)[number] += 1e-3
        other = LearnedSink(sink.k.clone(), sink.v, sink.witness, ABOUT)
        cache = with_sink(model, tmp_path / f"{number}", other).chunk_cache
        keys.add(str(cache.key(chunk, cache.sink)))
    assert len(keys) == 3


def test_evaluations_tell_sinks_of_one_length_apart(tmp_path, narrow, tokenizer):
    engine = LLM(narrow, tokenizer, sink_prefix="none", **SETTINGS).engine
    examples, digests = synthetic(1, 0), set()
    for number in range(2):
        sink = sink_of_tokens(engine, random_tokens(9))
        with with_sink(narrow, tmp_path / f"{number}", sink, tokenizer=tokenizer) as llm:
            digests.add(make_plan(llm, examples, ()).digest)
    assert len(digests) == 2


def test_all_recomputed_is_a_full_prefill(tmp_path):
    model = make("llama", 2)
    engine = LLM(model, sink_prefix="none", **SETTINGS).engine
    sink = sink_of_tokens(engine, random_tokens(9))
    sink.k.add_(torch.randn_like(sink.k))
    llm = with_sink(model, tmp_path / "sink", sink)
    tokens = random_tokens(50)
    prompt = ChunkedPrompt(tokens, (Span(4, 20), Span(21, 40)))
    with llm.engine.session():
        ours = llm.assemble(prompt, 1.0).logits
        reused = llm.assemble(prompt, 0.0).logits
    theirs = llm.engine.plain_logits(tokens, 1, 0)[-1]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (reused - theirs).abs().max() > 1e-3  # so that the comparison means something


def test_the_gate_finds_a_sink_that_is_another(tmp_path, monkeypatch):
    model = make("llama", 3)
    sink = sink_of_tokens(LLM(model, sink_prefix="none", **SETTINGS).engine, random_tokens(16))
    with_sink(model, tmp_path / "sink", sink).chunk_cache.get_stats()
    right = CapturedKV.update

    def another(self, key_states, value_states, layer_idx, *args, **kwargs):
        k, v = right(self, key_states, value_states, layer_idx, *args, **kwargs)
        hidden = k.shape[2] - key_states.shape[2]
        return k, torch.cat([-v[:, :, :hidden], v[:, :, hidden:]], dim=2)

    monkeypatch.setattr(CapturedKV, "update", another)
    with pytest.raises(ConfigError, match="self-test failed"):
        with_sink(model, tmp_path / "sink", sink).chunk_cache.get_stats()


def test_a_sink_of_another_model_is_refused(tmp_path):
    model, other = make("llama", 4), make("llama", 5)
    sink = sink_of_tokens(LLM(other, sink_prefix="none", **SETTINGS).engine, random_tokens(9))
    with pytest.raises(ConfigError, match="learned for tiny"):
        with_sink(model, tmp_path / "sink", sink)


def test_chunks_behind_a_system_prompt_have_no_sink(tmp_path):
    """The sink's file is not even read."""
    llm = LLM(make("llama", 6), chunk_context="system", sink_prefix=f"learned:{tmp_path / 'nowhere'}", **SETTINGS)
    system, chunk = random_tokens(5), random_tokens(25)
    [item] = llm.chunk_cache.find_or_fill([chunk], system, 60)
    for ours, theirs in zip(kv_of(item.entry), llm.engine.fill(system, [chunk], 60)[0], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("smollm2-135m", 1),
        pytest.param("smollm2-135m", 3, marks=pytest.mark.long),
        pytest.param("gemma-3-270m", 3, marks=pytest.mark.long),
    ],
)
def test_the_sink_that_comes_with_the_package_is_the_default_and_better_than_the_text(
    name, count, monkeypatch, tmp_path
):
    """Mean KL of the next token to a full prefill, over a few prompts, with nothing recomputed."""
    monkeypatch.delenv("KVMOSAIC_PROFILES_DIR")
    monkeypatch.setattr("platformdirs.user_config_dir", lambda _: str(tmp_path))
    kl = {}
    for given in ({}, {"sink_prefix": "document"}):
        found = []
        with LLM(name, dtype="float32", **SETTINGS, **given) as llm:
            for example in synthetic(count, 0, 1):
                messages = messages_about(example.system, example.chunks, example.question)
                prompt = llm.parser.parse_named(chat_prompt(llm.tokenizer, messages).token_ids, example.chunks).prompt
                with llm.engine.session():
                    full, ours = llm.full_prefill(prompt), llm.assemble(prompt, 0.0)
                    found += kl_per_token(full.logits[None], ours.logits[None])
            kl[llm.config.sink_prefix] = fmean(found)
    print(kl)
    learned, text = kl
    assert learned.startswith("learned:")
    assert kl[learned] < 0.9 * kl[text]
