"""The start-up gate: errors turn the cache off with one line, and right results do not."""

import logging
from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvmosaic.engines.hf.attention as attention
import kvmosaic.engines.hf.model as hf_model
import kvmosaic.kernels.remap as remap_kernel
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.rotation import RotaryColumns
from kvmosaic.engines.hf.self_test import self_test
from kvmosaic.hf import LLM
from kvmosaic.models import resolve
from tests.engines.hf.tiny import CHUNKED, SUPPORTED, make
from tests.examples import examples
from tests.half_precision import fast_products

TEXT = "Be brief. # # The ferry leaves at six. # # The bakery is owned by Tomas Reed. # # Who owns the bakery?"


def keys_not_turned(patch):
    patch.setattr(remap_kernel, "rotate_", lambda *_: None)


def keys_turned_in_other_pairs(patch):
    def other_pairs(rows, turn, columns):
        right(rows, turn, RotaryColumns(columns.part, columns.start, columns.width, not columns.interleaved))

    right = remap_kernel.rotate_
    patch.setattr(remap_kernel, "rotate_", other_pairs)


def first_tokens_left_out(patch):
    """Leaves out KV as LMCache does for separators."""

    def without_them(entry, k_out, v_out, position, turns):
        right(entry, k_out, v_out, position, turns)
        k_out[:, :, position : position + 4] = v_out[:, :, position : position + 4] = 0

    right = hf_model.remap
    patch.setattr(hf_model, "remap", without_them)


def future_in_sight(patch):
    def everything(self, rule):
        return torch.ones(1, len(self.positions), self.length, dtype=torch.bool)

    patch.setattr(attention.AttentionPlan, "visible", everything)


def chunks_see_each_other(patch):
    def in_one_row(self, context, chunks, length, *start, **sink):
        joined = [token for chunk in chunks for token in chunk]
        [(k, v)] = right(self, context, [joined], length, *start, **sink)
        sizes = [len(chunk) for chunk in chunks]
        return list(zip(k.split(sizes, dim=2), v.split(sizes, dim=2), strict=True))

    right = hf_model.HFModel.fill
    patch.setattr(hf_model.HFModel, "fill", in_one_row)


BREAKS = [
    keys_not_turned,
    keys_turned_in_other_pairs,
    first_tokens_left_out,
    future_in_sight,
    chunks_see_each_other,
]


SETTINGS = [{"sink_prefix": prefix} for prefix in ("bos", "none", "document")] + [{"chunk_context": "system"}]
FIRST = (keys_not_turned, torch.float32)


@pytest.fixture(params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def dtype(request):
    if request.param == torch.float32:
        yield request.param  # watching each operation takes longer than a small model does
    else:
        with fast_products():
            yield request.param


@pytest.mark.parametrize("broken", BREAKS)
def test_broken_reuse_is_refused_and_the_service_goes_on(broken, dtype, narrow, tokenizer, monkeypatch, caplog):
    refuses(broken, deepcopy(narrow).to(dtype), tokenizer, monkeypatch, caplog)


@pytest.mark.parametrize(
    ("broken", "dtype"),
    [
        pytest.param(broken, dtype, marks=pytest.mark.slow if (broken, dtype) == FIRST else pytest.mark.long)
        for broken in BREAKS
        for dtype in (torch.float32, torch.bfloat16)
    ],
    indirect=["dtype"],
)
def test_and_so_it_is_on_a_real_model(broken, dtype, smollm2_folder, tokenizer, monkeypatch, caplog):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=dtype).eval()
    refuses(broken, model, tokenizer, monkeypatch, caplog)


def refuses(broken, model, tokenizer, monkeypatch, caplog):
    broken(monkeypatch)
    with caplog.at_level(logging.WARNING):
        llm = LLM(model, tokenizer, enable_chunk_cache=True)
    [record] = [record for record in caplog.records if record.name.startswith("kvmosaic")]
    assert record.levelno == logging.ERROR
    assert "self-test failed" in record.message
    assert "%" in record.message
    assert "\n" not in record.message
    with pytest.raises(ConfigError, match="the chunk cache is off: self-test failed"):
        _ = llm.chunk_cache
    [output] = llm.generate(TEXT, max_tokens=6, temperature=0)
    [plain] = LLM(model, tokenizer).generate(TEXT, max_tokens=6, temperature=0)
    assert output.token_ids == plain.token_ids
    assert output.mode == "plain"
    assert output.fallback_reason.startswith("self-test failed")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_model_passes_with_every_sink_prefix(setting, dtype, narrow, tokenizer):
    llm = LLM(deepcopy(narrow).to(dtype), tokenizer, enable_chunk_cache=True, **setting)
    assert llm.chunk_cache.get_stats()["total_chunks"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-3-270m"])
def test_real_models_pass_with_every_sink_prefix(name, dtype):
    folder = resolve(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for setting in SETTINGS:
        llm = LLM(model, tokenizer, enable_chunk_cache=True, **setting)
        assert llm.chunk_cache.get_stats()["total_chunks"] == 0
        assert llm.chunk_cache.get_stats()["cache_misses"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*SUPPORTED, *CHUNKED])
def test_random_weights_pass(name, dtype):
    """Rounding errors send tokens to other experts in the mixtures of experts among them."""
    for seed in range(examples(3, 1)):
        with fast_products():
            llm = LLM(make(name, seed).to(dtype), enable_chunk_cache=True)
        assert llm.chunk_cache is not None


def test_a_model_with_few_positions():
    for positions in (32, 16, 8):
        model = make("llama")
        model.config.max_position_embeddings = positions
        assert LLM(model, enable_chunk_cache=True).chunk_cache is not None


def test_switched_off(monkeypatch):
    keys_not_turned(monkeypatch)
    llm = LLM(make("llama"), enable_chunk_cache=True, self_test=False)
    assert self_test(llm.engine, (1,), "alone") is not None
