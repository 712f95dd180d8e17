"""Documents in 8 bits in the embedded engine: nearly the same logits, and exact ones where exactness is promised."""

import random

import pytest
import torch

from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.hf import self_test as hf_self_test
from kvmosaic.hf import LLM
from tests.engines.hf.test_exact import TOLERANCE, assembled_logits, plain_logits, random_prompt
from tests.engines.hf.tiny import make
from tests.entries import kv_of

KINDS = ["llama", "gemma3", "deepseek-v2"]
SETTINGS = {"enable_chunk_cache": True, "miss_policy": "fill-first"}


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """Engines of one model, without and with 8 bits."""
    model = make(request.param, random.randrange(2**31))
    return [LLM(model, entry_dtype=dtype, **SETTINGS) for dtype in ("auto", "int8")]


def test_entries_are_those_of_the_other_engine_in_8_bits(pair):
    prompt = random_prompt(60)
    for llm in pair:
        assembled_logits(llm, prompt, 0.0)
    for span in prompt.chunks:
        tokens = prompt.tokens_of(span)
        exact, small = (
            llm.chunk_cache.store.lookup(
                llm.chunk_cache.key(tokens, llm.chunk_cache.sink, 60), tokens, llm.chunk_cache.sink
            ).entry
            for llm in pair
        )
        assert small.data.dtype == torch.int8
        assert small.nbytes < 0.4 * exact.nbytes  # the model computes in single precision
        for ours, theirs in zip(kv_of(small), kv_of(exact), strict=True):
            assert ours.dtype == theirs.dtype
            bound = theirs.abs().amax(-1, keepdim=True) * 1.01 / 253
            assert ((ours - theirs).abs() <= bound).all()


@pytest.mark.parametrize("length", [60, 100])
def test_logits_are_nearly_those_of_exact_entries(pair, length):
    prompt = random_prompt(length)
    exact, small = (assembled_logits(llm, prompt, 0.0) for llm in pair)
    distance = float((small - exact).norm() / (exact - exact.mean()).norm())
    assert 0 < distance < 0.05
    again = assembled_logits(pair[1], prompt, 0.0)  # from the store: new chunks are not exact either
    assert torch.equal(small, again)


def test_all_recomputed_is_exact(pair):
    prompt = random_prompt(60)
    for llm in pair:
        ours = assembled_logits(llm, prompt, 1.0)
        torch.testing.assert_close(ours, plain_logits(llm.model, prompt.token_ids), atol=TOLERANCE, rtol=TOLERANCE)


def test_engines_of_both_kinds_on_one_directory(tmp_path):
    model = make("llama", 1)
    prompt = random_prompt(60)
    chunks = len({prompt.tokens_of(span) for span in prompt.chunks})
    for dtype, misses in (("auto", chunks), ("int8", chunks), ("auto", 0), ("int8", 0)):
        with LLM(model, entry_dtype=dtype, disk_path=tmp_path, **SETTINGS) as llm:
            assembled_logits(llm, prompt, 0.0)
            stats = llm.chunk_cache.get_stats()
            assert stats["cache_misses"] == misses
            assert stats["corrupt_set_aside"] == 0
    sizes = sorted(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert len(sizes) == 2 * chunks


def test_wrong_scales_turn_the_cache_off(monkeypatch, caplog):
    """Only this part of the start-up test can notice it, because the other parts use exact entries."""
    model = make("llama", 2)
    of = hf_self_test.PackedKV.of

    def wrong(k, v, form):
        packed = of(k, v, form)
        if form.is_int8:
            for layer in range(form.layers):
                packed.parts(layer).k_scales.mul_(4)
        return packed

    monkeypatch.setattr(hf_self_test.PackedKV, "of", wrong)
    assert LLM(model, **SETTINGS)._off_reason is None
    assert "8 bits" in LLM(model, entry_dtype="int8", **SETTINGS)._off_reason
    assert "entry_dtype=auto" in caplog.text


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match="entry_dtype='fp8'"):
        LLM(make("llama", 3), entry_dtype="fp8", **SETTINGS)
