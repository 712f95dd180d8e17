"""Sets that shrink from layer to layer in models whose decoder layers take other inputs, and on several ranks."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvmosaic.blend import policy_named
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.forward import narrowing_trial
from kvmosaic.hf import LLM as HFEngine
from tests.engines.vllm.helpers import (
    LATENT,
    ask,
    chosen_last,
    draw,
    greedy,
    hooked_modules,
    join,
    kept_last,
    limit_runs,
    plain_answer,
    same,
    start,
    worker_side,
)
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.test_lora import ADAPTERS, write_adapter, write_merged
from tests.engines.vllm.tiny import SIX_LAYERS, write_model, write_tiny_deepseek, write_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.skipif(torch.cuda.is_available(), reason="float32 and CPU kernels")]

SETTINGS: dict[str, Any] = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_model_len": 1024}
LENGTHS = (21, 33, 48, 64, 70)


def write_tiny_granite(folder) -> str:
    """Write a tiny Granite, whose decoder layers get positions and hidden states only, and return no residual."""
    return write_model(folder, GraniteForCausalLM(GraniteConfig(**SIX_LAYERS, attention_multiplier=0.2)))


@pytest.fixture(params=["gemma", "granite", "latent"])
def case(request, tmp_path):
    """A model, its engine's settings and a policy."""
    if request.param == "gemma":
        model = request.getfixturevalue("tiny_gemma")
        return model, {"window_tails": False}, "kv-deviation(layers=1+2+4)"
    if request.param == "granite":
        return write_tiny_granite(tmp_path), {}, "kv-deviation(part=v, layers=1+2+3)"
    if not hasattr(AttentionBackendEnum, "CPU_MLA"):
        pytest.skip("this release of vLLM has no MLA on CPUs")
    return write_tiny_deepseek(tmp_path, layers=5), LATENT, "kv-deviation(layers=1+3)"


def prompt():
    return join([draw(random.randint(1, 50)), *(draw(each) for each in random.sample(LENGTHS, 4)), draw(9)])


def test_both_engines_keep_the_same_tokens(case, monkeypatch):
    """Also if the backend takes fewer runs than there are."""
    model, settings, policy = case
    llm = start(model, **SETTINGS | settings)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference = HFEngine(loaded, enable_chunk_cache=True, miss_policy="fill-first", min_chunk_tokens=1)
    before = hooked_modules()
    for most_runs in (None, None, 4):
        if most_runs is not None:
            limit_runs(monkeypatch, most_runs)
        ids, boundaries = prompt()
        with reference.engine.session():
            parsed = reference.parser.parse(ids, boundaries)
            expected = reference.assemble(parsed, 0.7, 0, policy_named(policy))
        [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.7, policy=policy)
        assert chosen_last() == expected.recomputed
        kept = kept_last()
        assert 0 < len(kept[-1]) < len(chosen_last())
        logprobs = expected.logits.log_softmax(-1)
        for token, seen in output.outputs[0].logprobs[0].items():
            assert seen.logprob == pytest.approx(float(logprobs[token]), abs=1e-3)
        [exact] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0, policy=policy)
        same(exact, plain_answer(llm, ids))
    assert hooked_modules() == before


def test_a_request_with_an_adapter(tmp_path):
    """It keeps the tokens that a model with merged weights keeps."""
    adapter = write_adapter(tmp_path / "adapter", 1)
    base = write_tiny_llama(tmp_path / "base", num_hidden_layers=5)
    merged = write_merged(tmp_path / "merged", base, adapter)
    prompts = [prompt() for _ in range(3)]
    given = {"policy": "kv-deviation(layers=1+2)", "recompute_ratio": 0.7}
    seen = []
    for model, settings in ((base, {**ADAPTERS, "max_loras": 2}), (merged, {})):
        llm, results = start(model, **SETTINGS | settings), []
        which = LoRARequest("adapter", 1, adapter) if settings else None
        sampling = greedy(1, detokenize=False)
        llm.generate([{"prompt_token_ids": draw(3)}], sampling, lora_request=which, use_tqdm=False)  # is loaded
        for ids, boundaries in prompts:
            sampling = greedy(8, logprobs=3, detokenize=False, params={"boundaries": boundaries, **given})
            [output] = llm.generate(
                [{"prompt_token_ids": ids}], sampling, lora_request=which and [which], use_tqdm=False
            )
            results.append((output, chosen_last(), kept_last()))
        seen.append(results)
    for (ours, *chosen), (theirs, *expected) in zip(*seen, strict=True):
        assert chosen == expected
        same(ours, theirs)


def kept_on(worker):
    return chosen_last(), kept_last()


def fallbacks_on(worker):
    return [label for name, label in worker_side().stats.noted if name == "fallbacks"]


def note_fallbacks(worker):
    """Make a rank note what it counts from now on."""
    stats = worker_side().stats
    count, stats.noted = stats.count_alike, []
    stats.count_alike = lambda *given: (stats.noted.append(given[:2]), count(*given))


def answers(llm, prompts, policy) -> list[Any]:
    """Answers to prompts at ratio 0.7, and the tokens that each rank computed."""
    results = []
    llm.collective_rpc(note_fallbacks)
    for ids, boundaries in prompts:
        assert llm.reset_prefix_cache()
        params = {"boundaries": boundaries, "recompute_ratio": 0.7, "policy": policy}
        [output] = llm.generate(
            [{"prompt_token_ids": ids}], greedy(8, detokenize=False, params=params), use_tqdm=False
        )
        results.append((list(output.outputs[0].token_ids), llm.collective_rpc(kept_on)))
    return [results, llm.collective_rpc(fallbacks_on)]


def disagree(worker):
    """The first trial of the model's layers fails on one rank."""
    is_right, failed = narrowing_trial._is_right, []

    def trial(*given):
        if worker_side().ranks.rank == 1 and not failed:
            failed.append(is_right(*given))
            return False
        return is_right(*given)

    narrowing_trial._is_right = trial


def call_on_ranks(llm, function):
    return llm.collective_rpc(function)


@pytest.mark.parametrize("kv_heads", [4, 1], ids=["split heads", "more ranks than heads"])
def test_two_ranks_keep_what_one_keeps(tmp_path, kv_heads):
    model = write_tiny_llama(tmp_path, kv_heads, num_hidden_layers=6)
    policy, prompts = "kv-deviation(layers=1+2+3)", [prompt() for _ in range(4)]
    prompts += prompts[:1]  # what is remembered
    with EngineApart(model, ranks=2, **SETTINGS) as engine:
        engine.call(call_on_ranks, disagree)
        two, reasons = engine.call(answers, prompts, policy)
    one, _ = answers(start(model, **SETTINGS), prompts, policy)
    assert reasons == [[], []]
    for (ours, (first, second)), (theirs, [alone]) in zip(two, one, strict=True):
        assert first == second == alone
        assert alone[1][-1]
        assert ours == theirs


@pytest.mark.skipif(not hasattr(AttentionBackendEnum, "CPU_MLA"), reason="this release of vLLM has no MLA on CPUs")
def test_deepseek_on_several_ranks_is_prefilled(tiny_deepseek):
    """vLLM's model joins the rows of all ranks if there are fewer hidden states than positions."""
    prompts = [prompt() for _ in range(2)]
    with EngineApart(tiny_deepseek, ranks=2, **SETTINGS, **LATENT) as engine:
        engine.call(call_on_ranks, note_fallbacks)
        ours = engine.call(only_answers, prompts, recompute_ratio=0.7, policy="kv-deviation(layers=0+1)")
        assert engine.call(call_on_ranks, fallbacks_on) == [[Fallback.SHRINKING_SET] * 2] * 2
        theirs = engine.call(only_answers, prompts, chunk_cache=False)
    assert ours == theirs


def only_answers(llm, prompts, **params):
    """Answers to prompts, which vLLM's prefix cache does not have."""
    tokens = []
    for ids, boundaries in prompts:
        assert llm.reset_prefix_cache()
        given = params if "chunk_cache" in params else {"boundaries": boundaries, **params}
        [output] = llm.generate(
            [{"prompt_token_ids": ids}], greedy(8, detokenize=False, params=given), use_tqdm=False
        )
        tokens.append(list(output.outputs[0].token_ids))
    return tokens
