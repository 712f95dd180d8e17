"""Requests with an adapter: their KV depends on it, so they are served by plain vLLM, and say why."""

import json

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from tests.engines.vllm.helpers import DOCUMENTS, answer, greedy, plain, prompt, same, start

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's GPU kernels have no float32 adapters"),
]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter that changes the attention of the first layers a lot."""
    folder = tmp_path_factory.mktemp("adapter")
    chance = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, 256, generator=chance)
        weights[f"{name}.lora_B.weight"] = torch.randn(128, 8, generator=chance)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return LoRARequest("changed", 1, str(folder))


def test_adapters_fall_back_and_the_others_reuse(adapter, tiny_text):
    llm = start(tiny_text, miss_policy="fill-first", enable_lora=True, max_lora_rank=8)
    text = prompt("You are helpful.", DOCUMENTS)

    def adapted(**params):
        sampling = greedy(10, logprobs=1, params=params)
        return llm.generate([text], sampling, lora_request=adapter, use_tqdm=False)[0]

    [base] = plain(llm, [text])
    expected = adapted(chunk_cache=False)
    assert expected.outputs[0].token_ids != base.outputs[0].token_ids, "the adapter changes nothing"
    answer(llm, [text])
    with_chunks = adapted(report=True)
    same(with_chunks, expected)
    assert with_chunks.kv_transfer_params == {"mode": "plain", "fallback_reason": "lora"}
    same(answer(llm, [text], recompute_ratio=1.0)[0], base)
