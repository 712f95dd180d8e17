"""Requests with a LoRA adapter: chunks are filled, stored and reused for each adapter apart."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from tests.engines.vllm.helpers import draw, greedy, join, report, same, start, statuses, store

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's GPU kernels have no float32 adapters"),
]

LENGTHS = (21, 33, 48, 64)
SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True}
RANK = 8
PART = "self_attn.v_proj"


def write_adapter(folder: Path, seed: int) -> str:
    """An adapter that changes the attention of all layers a lot."""
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.{PART}"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, 256, generator=chance) * 0.1
        weights[f"{name}.lora_B.weight"] = torch.randn(128, RANK, generator=chance) * 0.1
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def write_merged(folder: Path, base: str, adapter: str) -> str:
    """A model that has an adapter's weights added to its own."""
    folder.mkdir()
    (folder / "config.json").write_bytes((Path(base) / "config.json").read_bytes())
    weights, added = (
        load_file(Path(base) / "model.safetensors"),
        load_file(Path(adapter) / "adapter_model.safetensors"),
    )
    for layer in range(3):
        name = f"model.layers.{layer}.{PART}"
        a, b = (added[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
        weights[f"{name}.weight"] += b @ a
    save_file(weights, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(f"adapter-{n}", n, write_adapter(folder / str(n), n)) for n in (1, 2)]


@pytest.fixture(scope="module")
def llm(tiny_llama):
    return start(tiny_llama, enable_lora=True, max_lora_rank=RANK, max_loras=1, max_cpu_loras=2, **SETTINGS)


def ask(llm, prompts, adapters, **params):
    """Answers to prompts with boundaries, each with its adapter, sent together."""
    sampling = [
        greedy(8, logprobs=3, detokenize=False, params={"boundaries": edges, **params}) for _, edges in prompts
    ]
    given = [{"prompt_token_ids": ids} for ids, _ in prompts]
    return llm.generate(given, sampling, lora_request=adapters, use_tqdm=False)


def test_each_adapter_has_its_chunks_and_ratio_one_is_plain(llm, adapters):
    documents = [draw(length) for length in LENGTHS]
    first, second = join([draw(9), *documents, draw(7)]), join([draw(30), *documents[::-1], draw(7)])
    for which in (None, *adapters):
        [filled] = ask(llm, [first], [which], report=True)
        assert statuses(filled) == ["filled"] * len(LENGTHS)
        [reused] = ask(llm, [second], [which], report=True)
        assert statuses(reused) == ["cached"] * len(LENGTHS)
        assert report(reused)["reused_tokens"] == sum(LENGTHS)
        [ours] = ask(llm, [second], [which], recompute_ratio=1.0)
        [plain] = ask(llm, [second], [which], chunk_cache=False)
        same(ours, plain)
    stored = [info.key.num_tokens for info in store().scan() if info.key.num_tokens in LENGTHS]
    assert sorted(stored) == sorted(LENGTHS * 3)


def test_one_batch_has_several_adapters(llm, adapters):
    """More adapters than vLLM has room for in a forward. Requests without one are left out: beside others, vLLM 0.32
    computes them wrongly on CPUs, with or without chunks."""
    documents = [draw(length) for length in LENGTHS]
    asked = [(join([draw(9), *documents, draw(7)]), which) for which in adapters * 2]
    for policy, ratio in (("composite", 0.0), ("random", 0.4), ("composite(asking=1)", 0.4)):
        alone = [ask(llm, [prompt], [which], policy=policy, recompute_ratio=ratio)[0] for prompt, which in asked]
        assert llm.reset_prefix_cache()
        together = ask(llm, *zip(*asked, strict=True), policy=policy, recompute_ratio=ratio)
        for ours, theirs in zip(together, alone, strict=True):
            same(ours, theirs)


def test_chunks_are_those_of_the_model_with_the_adapter_merged(llm, adapters, tiny_llama, tmp_path):
    """The last test of the engine: it starts another one."""
    documents = [draw(length) for length in LENGTHS]
    prompts = [join([draw(9), *documents, draw(7)]), join([draw(30), *documents[::-1], draw(7)])]
    cases = [(prompt, {"recompute_ratio": ratio}) for prompt in prompts for ratio in (0.0, 0.4)]
    ours = [ask(llm, [prompt], [adapters[0]], policy="random", **params)[0] for prompt, params in cases]
    base = [ask(llm, [prompt], [None], policy="random", **params)[0] for prompt, params in cases]
    merged = start(write_merged(tmp_path / "merged", tiny_llama, adapters[0].lora_path), **SETTINGS)
    for (prompt, params), adapted, plain in zip(cases, ours, base, strict=True):
        [expected] = ask(merged, [prompt], None, policy="random", **params)
        same(adapted, expected)
        assert adapted.outputs[0].logprobs != plain.outputs[0].logprobs


def test_an_adapter_without_files_falls_back(adapters):
    from kvmosaic.engines.vllm.scheduler_side.adapters import AdapterDigests

    digests = AdapterDigests()
    known = [digests.digest(each) for each in adapters]
    assert None not in known
    assert known[0] != known[1]
    again = LoRARequest("other-name", 7, adapters[0].lora_path)
    assert digests.digest(again) == known[0]
    assert digests.digest(LoRARequest("gone", 8, "/nowhere")) is None
