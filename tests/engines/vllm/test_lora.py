"""Requests with LoRA adapters: chunks are filled, stored and reused separately for each adapter, which is identified
by its weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvmosaic.engines.vllm.compat.adapters import with_adapter
from kvmosaic.engines.vllm.scheduler_side import idle_fills
from tests.engines.vllm.helpers import (
    LATENT,
    SMALL,
    adapter_manager,
    draw,
    exact,
    greedy,
    join,
    measure_nothing,
    near,
    note_adapters,
    report,
    same,
    scheduler_side,
    set_miss_policy,
    set_overdue,
    start,
    statuses,
    store,
    stored_entry,
    waiting_fills,
    worker_side,
)
from tests.engines.vllm.processes import EngineApart

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's GPU kernels have no float32 adapters"),
]

LAYERS, RANK = 3, 8
LENGTHS = (21, 33, 48, 64)
SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_num_batched_tokens": 512}
ADAPTERS = {"enable_lora": True, "max_lora_rank": RANK}
Parts = dict[str, tuple[int, int]]
"""Projections that adapters change, with the numbers of their inputs and outputs."""
PARTS: Parts = {"q_proj": (256, 256), "v_proj": (256, 128)}
"""Two of a packed module, of which the third has no adapter."""
LATENT_PARTS: Parts = {"q_proj": (128, 4 * (128 + 64)), "kv_a_proj_with_mqa": (128, 512 + 64), "o_proj": (512, 128)}
"""Those of the tiny DeepSeek. The second one makes the latent, which is cached."""


def write_adapter(
    folder: Path,
    seed: int,
    alpha: int = RANK,
    parts: Parts = PARTS,
    layers: int = LAYERS,
    model: str = "model",
) -> str:
    """Write an adapter in PEFT's format that changes the attention of all layers strongly. ``model``: name of the
    part of a checkpoint that has the layers."""
    chance = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for part, (inputs, outputs) in parts.items():
            name = f"base_model.model.{model}.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=chance) * 0.1
            weights[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=chance) * 0.1
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": [*parts], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def write_adapters(folder: Path, **changes: Any) -> list[LoRARequest]:
    """Write three adapters."""
    return [LoRARequest(f"adapter {n}", n, write_adapter(folder / str(n), n, **changes)) for n in (1, 2, 3)]


def write_merged(folder: Path, base: str, adapter: str, parts: Parts = PARTS) -> str:
    """Write a model whose weights include an adapter's."""
    folder.mkdir()
    (folder / "config.json").write_bytes((Path(base) / "config.json").read_bytes())
    weights = load_file(Path(base) / "model.safetensors")
    added = load_file(Path(adapter) / "adapter_model.safetensors")
    for layer in range(LAYERS):
        for part in parts:
            name = f"model.layers.{layer}.self_attn.{part}"
            a, b = (added[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
            weights[f"{name}.weight"] += b @ a
    save_file(weights, folder / "model.safetensors")
    return str(folder)


@dataclass(frozen=True)
class Kind:
    """A kind of attention."""

    model: str
    """Name of the fixture that writes a model."""
    parts: Parts
    settings: dict[str, Any]


KINDS = {
    "heads": Kind("tiny_llama", PARTS, SETTINGS),
    # Without chunked prefill, which vLLM does not have for latent attention on CPUs, a step is as long as a prompt.
    "latent": Kind("tiny_deepseek", LATENT_PARTS, SETTINGS | {"max_model_len": 512, **LATENT}),
}


@pytest.fixture(scope="module", params=KINDS if hasattr(AttentionBackendEnum, "CPU_MLA") else ["heads"])
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def model(kind, request):
    return request.getfixturevalue(kind.model)


@pytest.fixture(scope="module")
def adapters(kind, tmp_path_factory):
    return write_adapters(tmp_path_factory.mktemp("adapters"), parts=kind.parts)


@pytest.fixture(scope="module")
def roomy(kind, model, adapters):
    """An engine with more places than adapters. On CPUs, vLLM 0.32 gives requests without an adapter the weights of
    the last place, which are zeros here."""
    llm = start(model, **ADAPTERS, max_loras=3, **kind.settings)
    for which in adapters[:2]:
        ask(llm, [([5, 6, 7], [])], [which])  # the first request has the adapter loaded
    return llm


def ask(llm, prompts, adapters, max_tokens=8, **params):
    """Answers to prompts with boundaries, each with its adapter, that are sent together."""
    sampling = [
        greedy(
            max_tokens, logprobs=3, detokenize=False, params={**({"boundaries": edges} if edges else {}), **params}
        )
        for _, edges in prompts
    ]
    given = [{"prompt_token_ids": list(ids)} for ids, _ in prompts]
    return llm.generate(given, sampling, lora_request=list(adapters), use_tqdm=False)


def ask_one(llm, prompt, adapter, **params):
    [answer] = ask(llm, [prompt], [adapter], **params)
    return answer


def plainly(llm, prompt, adapter, **params):
    """The answer of a full prefill."""
    assert llm.reset_prefix_cache()
    return ask_one(llm, prompt, adapter, chunk_cache=False, **params)


def entries_of(lengths=LENGTHS):
    """Keys of stored entries of these lengths."""
    return [info.key for info in store().scan() if info.key.num_tokens in lengths]


def two_orders():
    documents = [draw(length) for length in LENGTHS]
    return join([draw(9), *documents, draw(7)]), join([draw(30), *documents[::-1], draw(7)])


def test_each_adapter_has_its_chunks_and_ratio_one_is_plain(roomy, adapters):
    first, second = two_orders()
    before = len(entries_of())
    for which in (None, *adapters[:2]):
        filled = ask_one(roomy, first, which, report=True)
        assert statuses(filled) == ["filled"] * len(LENGTHS)
        assert roomy.reset_prefix_cache()
        reused = ask_one(roomy, second, which, report=True)
        assert statuses(reused) == ["cached"] * len(LENGTHS)
        assert report(reused)["reused_tokens"] == sum(LENGTHS)
        assert roomy.reset_prefix_cache()
        ours = ask_one(roomy, second, which, recompute_ratio=1.0)
        same(ours, plainly(roomy, second, which))
    assert len(entries_of()) == before + 3 * len(LENGTHS)


def test_one_batch_has_the_base_model_and_two_adapters(roomy, adapters):
    first, second = two_orders()
    asked = [(prompt, which) for prompt in (first, second) for which in (None, *adapters[:2])]
    prompts, whose = zip(*asked, strict=True)
    for policy, ratio in (("composite", 0.0), ("random", 0.4), ("composite(asking=1)", 0.4), ("none", 1.0)):
        params = {"policy": policy, "recompute_ratio": ratio}
        assert roomy.reset_prefix_cache()
        alone = [ask_one(roomy, prompt, which, **params) for prompt, which in asked]
        assert roomy.reset_prefix_cache()
        together = ask(roomy, prompts, whose, **params)
        for ours, theirs in zip(together, alone, strict=True):
            same(ours, theirs)
    told = {tuple(answer.outputs[0].token_ids) for answer in together}
    assert len(told) == len(asked), "the adapters change nothing"


def test_a_batch_that_is_filled_together_has_the_chunks_of_each(roomy, adapters, monkeypatch):
    """Entries that are filled together in one step equal those that are filled alone."""
    passes = note_adapters(monkeypatch)
    first, _ = two_orders()
    prompts = [first] * 3
    whose = [None, *adapters[:2]]
    ask(roomy, prompts, whose)
    assert {0, 1, 2} <= {*passes}
    together = {key: stored_entry(key).data.clone() for key in entries_of()}
    roomy.collective_rpc("chunk_cache_clear")
    assert roomy.reset_prefix_cache()
    for which in whose:
        ask_one(roomy, first, which)
    alone = {key: stored_entry(key).data for key in entries_of()}
    assert together.keys() >= alone.keys()
    assert len(alone) == 3 * len(LENGTHS)
    for key, data in alone.items():
        assert torch.allclose(data, together[key], atol=1e-5)


def test_fills_of_an_adapter_wait_for_it_and_are_dropped(roomy, adapters, monkeypatch):
    measure_nothing(monkeypatch)
    set_miss_policy(monkeypatch, roomy, "background")
    set_overdue(monkeypatch, 1e9)  # only in steps that compute no prompts
    first, _ = two_orders()
    before = len(entries_of())
    ask_one(roomy, first, adapters[0], max_tokens=1)  # finished with its only step
    assert waiting_fills(roomy) == len(LENGTHS)
    ask_one(roomy, (draw(20), []), None, max_tokens=10)
    assert waiting_fills(roomy) == len(LENGTHS)
    assert len(entries_of()) == before
    monkeypatch.setattr(idle_fills, "IDLE_SECONDS", 0.0)
    side, counted = scheduler_side(roomy), []
    count = side.stats.count

    def noting(name, label, amount=1):
        counted.append((name, amount))
        count(name, label, amount)

    monkeypatch.setattr(side.stats, "count", noting)
    ask_one(roomy, (draw(20), []), None, max_tokens=2)
    assert ("dropped_fills", len(LENGTHS)) in counted
    assert not waiting_fills(roomy)


def test_preempted_requests_resume_with_their_adapter(kind, model, adapters):
    """The blocks do not suffice for all requests."""
    little = {"num_gpu_blocks_override": 832 // (SMALL | kind.settings)["block_size"], "max_model_len": 512}
    llm = start(model, **ADAPTERS, max_loras=3, **kind.settings | little)
    for which in adapters[:2]:
        ask(llm, [([5, 6, 7], [])], [which])
    asked = [(two_orders()[0], which) for which in (*adapters[:2], None, *adapters[:2])]
    alone = [ask_one(llm, prompt, which, max_tokens=60) for prompt, which in asked]
    assert llm.reset_prefix_cache()
    together = ask(llm, *zip(*asked, strict=True), max_tokens=60)
    for ours, theirs in zip(together, alone, strict=True):
        same(ours, theirs)
    assert sum(each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions") > 0


def test_nothing_is_evicted_or_activated_by_us(kind, model, adapters, monkeypatch):
    """With vLLM's defaults, one adapter is active and one is in memory. Three adapters take turns."""
    llm = start(model, **ADAPTERS, **kind.settings | {"miss_policy": "background"})
    measure_nothing(monkeypatch)
    set_overdue(monkeypatch, 0.0)
    seen = note_adapters(monkeypatch)
    prompts = [two_orders() for _ in adapters]
    for round_ in range(3):
        for (first, second), which in zip(prompts, adapters, strict=True):
            before = len(seen)
            answer = ask_one(llm, second if round_ == 2 else first, which, max_tokens=20, report=True)
            assert set(seen[before:]) <= {which.lora_int_id}
            assert adapter_manager().lora_index_to_id == [which.lora_int_id]
            assert adapter_manager().list_adapters().keys() == {which.lora_int_id}
            if round_ == 2:
                assert statuses(answer) == ["cached"] * len(LENGTHS), "filled while it was active"
                same(ask_one(llm, second, which, recompute_ratio=1.0), plainly(llm, second, which))
    assert not waiting_fills(llm)
    assert {1, 2, 3} <= {*seen}


def test_weights_that_are_replaced_under_the_same_name(tiny_llama, tmp_path):
    """vLLM reads the files again when it loads the adapter again, without any notice."""
    llm = start(tiny_llama, **ADAPTERS, max_loras=2, **SETTINGS)
    first, second = two_orders()
    path = write_adapter(tmp_path / "adapter", 1)
    which = LoRARequest("adapter", 1, path)
    ask_one(llm, first, which)
    assert statuses(ask_one(llm, first, which, report=True)) == ["filled"] * len(LENGTHS)
    assert len(entries_of()) == len(LENGTHS)
    old = plainly(llm, second, which)

    write_adapter(tmp_path / "adapter", 7)
    assert llm.llm_engine.remove_lora(1)
    # Planned with the old weights, and loaded with the new ones.
    answer = ask_one(llm, second, which, report=True)
    new = plainly(llm, second, which)
    same(answer, new)
    assert new.outputs[0].token_ids != old.outputs[0].token_ids
    assert len(entries_of()) == len(LENGTHS)
    assert statuses(ask_one(llm, second, which, report=True)) == ["filled"] * len(LENGTHS)
    assert len(entries_of()) == 2 * len(LENGTHS)
    same(ask_one(llm, second, which, recompute_ratio=1.0), new)

    write_adapter(tmp_path / "adapter", 1)
    assert llm.llm_engine.add_lora(LoRARequest("adapter", 1, path, load_inplace=True))
    ask_one(llm, ([5, 6, 7], []), None)  # a step, after which the scheduler knows
    assert llm.reset_prefix_cache()
    assert statuses(ask_one(llm, second, which, report=True)) == ["cached"] * len(LENGTHS)
    same(ask_one(llm, second, which, recompute_ratio=1.0), old)


def test_a_pass_between_steps_does_not_need_the_adapters_of_the_last_step(tiny_llama, tmp_path):
    """They may be gone by then. vLLM's newer runner starts on a GPU with such adapters, which it made up to measure
    memory."""
    llm = start(tiny_llama, **ADAPTERS, **SETTINGS)
    ask_one(llm, ([5, 6, 7], []), LoRARequest("adapter", 1, write_adapter(tmp_path / "adapter", 1)), max_tokens=1)
    assert llm.llm_engine.remove_lora(1)
    with with_adapter(worker_side().forward._runner, 0, 1, 4):
        assert adapter_manager()._last_mapping.prompt_mapping == (0,)


def test_digests_are_those_of_what_is_loaded(tiny_llama, tmp_path):
    """Scaling counts. Names and files that were not read do not count."""
    llm = start(tiny_llama, **ADAPTERS, max_loras=4, **SETTINGS)
    folders = [
        write_adapter(tmp_path / name, 1, alpha) for name, alpha in (("a", RANK), ("b", RANK), ("c", 2 * RANK))
    ]
    for number, folder in enumerate(folders, start=1):
        ask_one(llm, ([5, 6, 7], []), LoRARequest(f"adapter {number}", number, folder))
    known = {number: loaded.digest for number, loaded in worker_side().adapters._loaded.items()}
    assert known[1] == known[2] != known[3]
    write_adapter(tmp_path / "a", 5)
    ask_one(llm, ([5, 6, 7], []), LoRARequest("adapter 1", 1, folders[0]))
    assert worker_side().adapters._loaded[1].digest == known[1]


def test_chunks_are_those_of_the_model_with_the_adapter_merged(kind, model, adapters, tmp_path):
    first, second = two_orders()
    cases = [(prompt, ratio) for prompt in (first, second) for ratio in (0.0, 0.4)]
    answers, entries = [], []
    llm = start(model, **ADAPTERS, max_loras=2, **kind.settings)
    ask_one(llm, ([5, 6, 7], []), adapters[0])
    base = [ask_one(llm, prompt, None, policy="random", recompute_ratio=ratio) for prompt, ratio in cases]
    llm.collective_rpc("chunk_cache_clear")
    merged = write_merged(tmp_path / "merged", model, adapters[0].lora_path, kind.parts)
    for which in (adapters[0], None):
        engine = llm if which is not None else start(merged, **kind.settings)
        answers.append(
            [ask_one(engine, prompt, which, policy="random", recompute_ratio=ratio) for prompt, ratio in cases]
        )
        entries.append({key.num_tokens: stored_entry(key).data.clone() for key in entries_of()})
    for ours, expected, other in zip(*answers, base, strict=True):
        same(ours, expected)
        assert ours.outputs[0].logprobs != other.outputs[0].logprobs
    for length in LENGTHS:
        ours, expected = (each[length] for each in entries)
        assert torch.allclose(ours, expected, atol=1e-4)


def reused_with(llm, first, second, which):
    """Answers with an adapter, and the digest of its weights on the first rank."""
    ask_one(llm, first, which)
    cases = [(first, 0.0), (second, 0.0), (second, 0.4), (second, 1.0)]
    answers = [ask_one(llm, prompt, which, policy="random", recompute_ratio=ratio) for prompt, ratio in cases]
    plain = plainly(llm, second, which)
    told = statuses(ask_one(llm, second, which, report=True))
    return [exact(answer) for answer in (*answers, plain)], told, scheduler_side(llm)._adapters._digests


@pytest.mark.long
def test_two_ranks_know_an_adapter_as_one_does(kind, model, adapters):
    first, second = two_orders()
    with EngineApart(model, ranks=2, **ADAPTERS, **kind.settings) as engine:
        two, told, digests = engine.call(reused_with, first, second, adapters[0])
    one, _, [alone] = reused_with(start(model, **ADAPTERS, **kind.settings), first, second, adapters[0])
    assert told == ["cached"] * len(LENGTHS)
    assert digests == [alone, alone]
    for mine, yours in zip(two, one, strict=True):
        near(mine, yours)
