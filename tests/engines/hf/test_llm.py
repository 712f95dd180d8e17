"""The public class: its reports, its fallbacks, and its errors."""

import logging
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.core.profile import Profile, profile_path, write_profile
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.hf import LLM
from tests.engines.hf.tiny import UNSUPPORTED, make

FILL_FIRST = {"enable_chunk_cache": True, "miss_policy": "fill-first", "chunk_separator": " # # "}
TOKENS = [random.Random(5).randrange(3, 300) for _ in range(400)]


def prompt(*sizes):
    """A prompt of parts of these sizes: system, chunks, question; equal sizes make equal parts."""
    tokens, spans = [], []
    for size in sizes:
        spans.append(Span(len(tokens), len(tokens) + size))
        tokens += TOKENS[size : 2 * size]
    return ChunkedPrompt(tuple(tokens), tuple(spans[1:-1]))


@pytest.fixture
def llm():
    with LLM(make("llama"), enable_chunk_cache=True) as engine:
        yield engine


@pytest.fixture
def filling():
    """An engine that stores documents before it answers, so that its first answer equals its later ones."""
    with LLM(make("llama"), **FILL_FIRST) as engine:
        yield engine


def test_counts_and_reasons(filling):
    llm = filling
    [first, second] = llm.generate([prompt(3, 20, 30, 20, 5), prompt(9, 30, 20, 11, 7)], max_tokens=2)
    assert [chunk.status for chunk in first.chunks] == ["filled", "filled", "cached"]  # the third repeats the first
    assert [chunk.reason for chunk in first.chunks] == ["new", "new", None]
    assert (first.mode, first.cached_tokens, first.filled_tokens, first.prefilled_tokens) == ("fill", 20, 50, 8)
    assert [chunk.tier for chunk in second.chunks] == ["host", "host", None]
    assert (second.cached_tokens, second.filled_tokens, second.prefilled_tokens) == (50, 11, 16)
    [third] = llm.generate([prompt(4, 11, 30, 6)], max_tokens=2, recompute_ratio=1.0)
    assert (third.mode, third.recomputed_tokens, third.cached_tokens) == ("reuse", 41, 41)
    stats = llm.chunk_cache.get_stats()
    assert (stats["cache_hits"], stats["cache_misses"], stats["total_chunks"]) == (4, 3, 3)
    assert stats["hit_rate"] == pytest.approx(4 / 7)
    assert stats["current_memory_mb"] > 0


def test_clear_and_warm(narrow, tokenizer):
    llm = LLM(narrow, tokenizer, min_chunk_tokens=1, **FILL_FIRST)
    assert llm.chunk_cache.warm(["The ferry leaves at six.", "The library opens at ten."]) == 2
    assert llm.chunk_cache.warm(["The ferry leaves at six."]) == 0
    text = "Be brief. # # The library opens at ten. # # The ferry leaves at six. # # When does the library open?"
    [output] = llm.generate(text, max_tokens=4, temperature=0)
    assert output.mode == "reuse"
    llm.chunk_cache.clear()
    assert llm.chunk_cache.get_stats()["total_chunks"] == 0
    [output] = llm.generate(text, max_tokens=4, temperature=0)
    assert output.mode == "fill"


def test_off_unless_asked_for():
    llm = LLM(make("llama"))
    [output] = llm.generate([prompt(3, 20, 5)], max_tokens=2)
    assert (output.mode, output.fallback_reason) == ("plain", "disabled")
    with pytest.raises(ConfigError, match="the chunk cache is off: disabled"):
        _ = llm.chunk_cache


def test_prompts_without_chunks_are_ordinary(llm):
    [output] = llm.generate([TOKENS[:30]], max_tokens=2)
    assert (output.mode, output.fallback_reason, output.prefilled_tokens) == ("plain", None, 30)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models_generate_without_the_cache(name, caplog):
    model = make(name)
    with caplog.at_level(logging.WARNING):
        llm = LLM(model, enable_chunk_cache=True)
    [line] = [record.message for record in caplog.records if record.name.startswith("kvmosaic")]
    assert "the chunk cache is off" in line
    assert "\n" not in line
    [output] = llm.generate([prompt(3, 20, 5)], max_tokens=3, temperature=0)
    wanted = model.generate(torch.tensor([prompt(3, 20, 5).token_ids]), max_new_tokens=3, do_sample=False)
    assert list(output.token_ids) == wanted[0, 28:].tolist()
    assert output.fallback_reason.startswith("unsupported model")


def test_dynamic_rope_beyond_its_limit_is_served_plainly():
    llm = LLM(make("llama-dynamic"), **FILL_FIRST)
    [short, long] = llm.generate([prompt(3, 20, 5), prompt(3, 20, 70, 5)], max_tokens=2)
    assert (short.mode, long.mode, long.fallback_reason) == ("fill", "plain", "rope-length")


def test_longrope_keeps_short_and_long_entries_apart():
    llm = LLM(make("phi3-longrope"), **FILL_FIRST)
    modes = [
        llm.generate([p], max_tokens=2)[0].mode for p in (prompt(3, 20, 5), prompt(3, 20, 70), prompt(9, 20, 71))
    ]
    assert modes == ["fill", "fill", "reuse"]


def test_a_chunk_that_does_not_fit_behind_its_sink_prefix_is_prefilled(narrow, tokenizer):
    """It fits into the prompt, but not behind a long sink prefix."""
    llm = LLM(narrow, tokenizer, **FILL_FIRST, min_chunk_tokens=1, sink_prefix="a long text " * 20)
    llm.chunk_cache._max_positions = 70
    text = "Be brief. # # " + "The ferry leaves. " * 8 + "# # Open at ten. # # When does it open?"
    [output] = llm.generate(text, max_tokens=3, temperature=0)
    assert [(chunk.status, chunk.reason) for chunk in output.chunks] == [("prefilled", "too-long"), ("filled", "new")]
    assert output.prefilled_tokens + output.filled_tokens == output.prompt_tokens


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[]], "empty"),
        (["text"], "no tokenizer"),
        ([list(range(3)) * 300], "exceed the model's 512 positions"),
        ([[1, 2, 300]], "between 0 and 299"),
        ([[1, -2, 3]], "between 0 and 299"),
        ([[1, 2**40]], "between 0 and 299"),
        ([1, 2, 3], "must be text, a list of token ids"),
        ([None], "must be text, a list of token ids"),
        ([b"bytes"], "must be text, a list of token ids"),
        ([[1.5, 2.0]], "must be text, a list of token ids"),
    ],
)
def test_bad_prompts_are_one_line_and_lose_nothing(llm, bad, message):
    llm.generate([prompt(3, 20, 5)], max_tokens=1)
    with pytest.raises(PromptError, match=message) as error:
        llm.generate([prompt(3, 30, 5), *bad], max_tokens=2)
    assert "\n" not in str(error.value)
    assert llm.chunk_cache.get_stats()["total_chunks"] == 1  # nothing is lost or half done
    assert llm.generate([prompt(3, 20, 5)], max_tokens=1)[0].mode == "reuse"


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 1.5},
        {"temperature": float("nan")},
        {"temperature": 1e-39},
        {"seed": 2**64},
        {"top_k": 1.5},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"recompute_ratio": 1.5},
        {"recompute_ratio": float("nan")},
        {"policy": "no-such-policy"},
    ],
)
def test_bad_parameters(llm, bad):
    with pytest.raises((PromptError, ConfigError)) as error:
        llm.generate([prompt(3, 20, 5)], **bad)
    assert next(iter(bad)) in str(error.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"recompute_ratio": 1.5},
        {"chunk_hash_algorithm": "md5"},
        {"sink_prefix": "a text"},
        {"policy": "sink-link(k=x)"},
    ],
)
def test_bad_settings(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LLM(make("llama"), enable_chunk_cache=True, **bad)


def test_sampling_is_reproducible_and_honours_the_models_settings(filling):
    llm = filling
    p = prompt(3, 20, 5)

    def tokens(**kw):
        return llm.generate([p], max_tokens=8, **kw)[0].token_ids

    assert tokens(temperature=1.0, seed=1) == tokens(temperature=1.0, seed=1)
    assert len({tokens(temperature=5.0, seed=seed) for seed in range(5)}) > 1
    assert tokens() == tokens(temperature=0)  # this model's own setting is greedy
    assert tokens(temperature=1.0, top_k=1, seed=3) == tokens(temperature=0)
    llm.model.generation_config.update(do_sample=True, temperature=5.0)
    assert len({tokens(seed=seed) for seed in range(5)}) > 1


def test_generation_stops_at_the_models_stop_token(llm):
    [output] = llm.generate([prompt(3, 20, 5)], max_tokens=6, temperature=0)
    llm.model.generation_config.eos_token_id = output.token_ids[2]
    [stopped] = llm.generate([prompt(3, 20, 5)], max_tokens=6, temperature=0)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == output.token_ids[2]


@pytest.mark.parametrize("algorithm", ["xxhash", "sha256"])
def test_entries_survive_a_restart(tmp_path, algorithm):
    settings = {**FILL_FIRST, "disk_path": tmp_path, "chunk_hash_algorithm": algorithm}
    with LLM(make("llama"), **settings) as llm:
        [before] = llm.generate([prompt(3, 20, 30, 5)], max_tokens=4, temperature=0)
    with LLM(make("llama"), **settings) as llm:
        [after] = llm.generate([prompt(3, 20, 30, 5)], max_tokens=4, temperature=0)
    assert [chunk.tier for chunk in after.chunks] == ["disk", "disk"]
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"name": "llama-linear"},
        {"tenant": "other"},
        {"sink_prefix": "none"},
        {"chunk_context": "system"},
        {"dtype": torch.bfloat16},
        {"config": {"rms_norm_eps": 1e-3}},
    ],
)
def test_entries_of_another_model_format_or_tenant_are_never_used(tmp_path, change):
    model = make("llama")
    model.name_or_path = "the same name"
    with LLM(model, **FILL_FIRST, disk_path=tmp_path) as llm:
        llm.generate([prompt(3, 20, 5)], max_tokens=1)
    settings = {key: value for key, value in change.items() if key not in ("seed", "name", "dtype", "config")}
    other = make(change.get("name", "llama"), change.get("seed", 0)).to(change.get("dtype", torch.float32))
    other.config.update(change.get("config", {}))
    other.name_or_path = "the same name"
    with LLM(other, **FILL_FIRST, disk_path=tmp_path, **settings) as llm:
        [output] = llm.generate([prompt(3, 20, 5)], max_tokens=1)
    assert [(chunk.status, chunk.reason) for chunk in output.chunks] == [("filled", "new")]


def test_a_damaged_file_is_filled_again_and_said_so(tmp_path):
    with LLM(make("llama"), **FILL_FIRST, disk_path=tmp_path) as llm:
        [before] = llm.generate([prompt(3, 20, 5)], max_tokens=4, temperature=0)
    [file] = tmp_path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with LLM(make("llama"), **FILL_FIRST, disk_path=tmp_path) as llm:
        [after] = llm.generate([prompt(3, 20, 5)], max_tokens=4, temperature=0)
        assert [chunk.reason for chunk in after.chunks] == ["corrupt"]
        assert llm.chunk_cache.get_stats()["corrupt_set_aside"] == 1
    assert after.token_ids == before.token_ids


def test_an_unusable_cache_directory_does_not_stop_the_service(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        llm = LLM(make("llama"), **FILL_FIRST, disk_path=blocked / "below")
    assert [llm.generate([prompt(3, 20, 5)], max_tokens=1)[0].mode for _ in range(2)] == ["fill", "reuse"]
    assert len([record for record in caplog.records if record.name.startswith("kvmosaic")]) == 1


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gemma3", "deepseek-v3", "cohere"])
def test_bfloat16(name):
    """In half precision the assembled prompt is as close to a plain prefill as half precision allows."""
    model = make(name)
    wanted = model(torch.tensor([prompt(3, 20, 30, 9).token_ids])).logits[0, -1]
    half = make(name).to(torch.bfloat16)
    rounding = (half(torch.tensor([prompt(3, 20, 30, 9).token_ids])).logits[0, -1].float() - wanted).norm()
    llm = LLM(half, **FILL_FIRST)
    with llm.engine.session():
        ours = llm.assemble(prompt(3, 20, 30, 9), 1.0).logits.float()
    assert (ours - wanted).norm() < 1.5 * rounding


def test_clear_leaves_other_tenants_alone(tmp_path):
    settings = {**FILL_FIRST, "disk_path": tmp_path}
    with LLM(make("llama"), tenant="a", **settings) as a, LLM(make("llama"), tenant="b", **settings) as b:
        for llm in (a, b):
            llm.generate([prompt(3, 20, 5)], max_tokens=1)
        a.chunk_cache.clear()
        modes = [llm.generate([prompt(3, 20, 5)], max_tokens=1)[0].mode for llm in (a, b)]
    assert modes == ["fill", "reuse"]


@pytest.mark.parametrize(
    ("tokens", "spans"),
    [((), ()), ((1, 2), (Span(0, 2),)), ((1, 2, 3), (Span(1, 1),)), ((1, 2, 3), (Span(1, 2), Span(0, 1)))],
)
def test_odd_chunked_prompts_are_refused(tokens, spans):
    with pytest.raises(PromptError):
        ChunkedPrompt(tokens, spans)


def test_ids_out_of_range_with_a_real_tokenizer(narrow, tokenizer):
    llm = LLM(narrow, tokenizer, enable_chunk_cache=True)
    with pytest.raises(PromptError, match="between 0 and 49151"):
        llm.generate([[1, 2**40]])


def test_a_separator_the_tokenizer_lacks_matters_only_when_the_cache_is_on(narrow):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words = PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="a")
    LLM(narrow, words, chunk_separator=" # # ")
    with pytest.raises(ConfigError, match="does not survive"):
        LLM(narrow, words, **FILL_FIRST)


def test_unknown_model_is_one_line():
    with pytest.raises(ConfigError, match="cannot load model '/nowhere/at/all'") as error:
        LLM("/nowhere/at/all")
    assert "\n" not in str(error.value)


def test_both_ways_of_generating_sample_from_the_same_distribution(llm):
    """The model's own generation settings, including those without a parameter of ours, apply with and without the
    cache."""
    llm.model.generation_config.update(do_sample=True, min_p=0.2, suppress_tokens=[5, 6], temperature=3.0)
    sampled = {True: set(), False: set()}
    for use, seen in sampled.items():
        for seed in range(200):
            [output] = llm.generate(
                [prompt(3, 20, 5)], max_tokens=1, seed=seed, use_chunk_cache=use, recompute_ratio=1.0
            )
            seen.add(output.token_ids)
    assert len(sampled[True]) > 1
    assert len(sampled[True] ^ sampled[False]) <= 2  # a rare token may be sampled on one side only


def test_threads_and_engines_share_a_model_safely(llm):
    other = LLM(llm.model, enable_chunk_cache=True)
    prompts = [prompt(3, 20 + n, 30, 5) for n in range(6)]
    exact = [llm.generate([p], max_tokens=3, temperature=0, use_chunk_cache=False)[0].token_ids for p in prompts]

    def work(number):
        engine, use = (llm, other)[number % 2], number % 3 != 0
        return [
            engine.generate([p], max_tokens=3, temperature=0, recompute_ratio=1.0, use_chunk_cache=use)[0].token_ids
            for p in prompts
        ]

    with ThreadPoolExecutor(6) as pool:
        for result in pool.map(work, range(12)):
            assert result == exact


def test_chunked_attention_is_exact_when_recomputed():
    model = make("llama4")
    llm = LLM(model, **FILL_FIRST)
    p = prompt(3, 20, 30, 5)
    with llm.engine.session():
        ours = llm.assemble(p, 1.0).logits
    torch.testing.assert_close(ours, model(torch.tensor([p.token_ids])).logits[0, -1], atol=1e-4, rtol=0)


def test_an_error_in_the_middle_leaves_the_model_as_it_was(llm):
    before = llm.model.config._attn_implementation
    with pytest.raises(RuntimeError, match="stop"), llm.engine.session():
        raise RuntimeError("stop")
    assert llm.model.config._attn_implementation == before


def test_warm_is_limited_to_what_can_be_reused(narrow, tokenizer):
    llm = LLM(narrow, tokenizer, enable_chunk_cache=True)
    assert llm.chunk_cache.warm(["word " * 9000]) == 0
    with pytest.raises(ConfigError, match="documents cannot be warmed"):
        LLM(narrow, tokenizer, enable_chunk_cache=True, chunk_context="system").chunk_cache.warm(["a b"])


@pytest.mark.parametrize("change", ["one row", "through data", "training"])
def test_weights_changed_after_the_start_make_new_entries(filling, change):
    llm = filling
    p = prompt(3, 20, 5)
    llm.generate([p], max_tokens=1)
    if change == "training":
        llm.model.train()
    elif change == "one row":
        with torch.no_grad():
            llm.model.get_input_embeddings().weight[p.token_ids[10]] *= -1
    else:  # torch counts no version for this
        llm.model.get_input_embeddings().weight.data += 1e-3
    [output] = llm.generate([p], max_tokens=1)
    assert output.mode == ("reuse" if change == "training" else "fill")
    assert llm.model.training == (change == "training")


def test_a_chunk_alone_may_be_in_another_rope_regime_than_its_prompt(tokenizer):
    """Behind a long sink prefix the chunk is past longrope's switch, but the prompt is not. Such KV must not be
    stored."""
    llm = LLM(make("phi3-longrope"), enable_chunk_cache=True)
    llm.chunk_cache.sink = tuple(range(3, 11))
    [output] = llm.generate([ChunkedPrompt(tuple(TOKENS[:62]), (Span(0, 61),))], max_tokens=1)
    assert [(chunk.status, chunk.reason) for chunk in output.chunks] == [("prefilled", "too-long")]


@pytest.mark.parametrize("policy", ["composite(layers=99)", "query-attention(layers=99)", "kv-deviation(layers=99)"])
def test_a_policy_that_needs_more_layers_than_there_are_is_refused_at_start(policy):
    with pytest.raises(ConfigError, match="layer"):
        LLM(make("llama"), enable_chunk_cache=True, policy=policy)


def test_a_policy_of_a_profile_that_does_not_exist_is_blamed_on_the_profile(smollm2_folder, tmp_path, monkeypatch):
    """For example, a policy with options that a newer version no longer has."""
    monkeypatch.setenv("KVMOSAIC_PROFILES_DIR", str(tmp_path))
    path = profile_path(str(smollm2_folder))
    write_profile(Profile(policy="composite(link=0.5)", recompute_ratio=0.15, sink_prefix="bos"), path)
    with pytest.raises(ConfigError) as error:
        LLM(str(smollm2_folder), enable_chunk_cache=True)
    assert str(path) in str(error.value)
    assert "link" in str(error.value)


def test_short_chunks_are_text_in_this_engine_too(narrow, tokenizer):
    llm = LLM(narrow, tokenizer, **FILL_FIRST)
    text = "Be brief. # # Open at ten. # # " + "The ferry leaves. " * 8 + "# # When does it open?"
    [output] = llm.generate(text, max_tokens=3, temperature=0)
    assert len(output.chunks) == 1
    assert llm.chunk_cache.warm(["Open at ten."]) == 0
    assert llm.chunk_cache.get_stats()["total_chunks"] == 1


def test_without_a_separator_no_text_makes_chunks(narrow, tokenizer):
    llm = LLM(narrow, tokenizer, enable_chunk_cache=True, miss_policy="fill-first")
    text = "Be brief. # # " + "The ferry leaves. " * 8 + "# # When does it open?"
    assert llm.generate(text, max_tokens=1)[0].mode == "plain"
    ids = tokenizer.encode(text)
    prompt = llm.parser.parse(ids, [(0, 4), (4, 30), (30, len(ids))])
    assert llm.generate([prompt], max_tokens=1)[0].mode == "fill"
