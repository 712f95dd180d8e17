"""Number formats that a CPU computes with, and the choice on a CPU without bfloat16 instructions."""

import pytest
import torch

import kvmosaic.engines.precision as precision
from kvmosaic.engines.precision import cpu_runs_bfloat16, needs_float32
from kvmosaic.hf import LLM
from tests.engines.hf.tiny import make
from tests.half_precision import fast_products, pretend_cpu


@pytest.mark.parametrize(("features", "runs"), [("fp asimd bf16 i8mm", True), ("fp asimd svebf16", False)])
def test_arm_cpus_say_what_they_have(features, runs, monkeypatch, tmp_path):
    pretend_cpu(monkeypatch, tmp_path, features)
    assert cpu_runs_bfloat16() is runs


def test_one_core_without_it_is_enough(monkeypatch, tmp_path):
    pretend_cpu(monkeypatch, tmp_path, "fp bf16")
    (tmp_path / "cpuinfo").write_text("Features : fp bf16\nFeatures : fp\n")
    assert not cpu_runs_bfloat16()


def test_other_cpus_are_not_asked(monkeypatch, tmp_path):
    """vLLM has kernels for x86 CPUs without bfloat16 instructions."""
    pretend_cpu(monkeypatch, tmp_path, "fp asimd")
    monkeypatch.setattr(precision.platform, "machine", lambda: "x86_64")
    assert cpu_runs_bfloat16()


def test_a_machine_that_does_not_say(monkeypatch, tmp_path):
    pretend_cpu(monkeypatch, tmp_path, "fp asimd")
    (tmp_path / "cpuinfo").unlink()
    assert cpu_runs_bfloat16()


def test_quantized_weights_keep_float16():
    assert [needs_float32(dtype, False) for dtype in ("bfloat16", "float16", "float32")] == [True, True, False]
    assert [needs_float32(dtype, True) for dtype in ("bfloat16", "float16", "float32")] == [True, False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the embedded engine takes the GPU, which has bfloat16")
@pytest.mark.parametrize(
    ("features", "dtype", "expected"),
    [("bf16", "auto", "bfloat16"), ("fp", "auto", "float32"), ("fp", "bfloat16", "bfloat16")],
)
def test_the_embedded_engine(features, dtype, expected, monkeypatch, tmp_path, tokenizer, caplog):
    pretend_cpu(monkeypatch, tmp_path, features)
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype=dtype)
    assert llm.model.dtype == getattr(torch, expected)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("kvmosaic")]
    changed = dtype == "auto" and expected == "float32"
    assert said == ["computing in float32 instead of bfloat16: this CPU has no bfloat16 instructions"] * changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fast_products_are_those_of_the_machine(dtype):
    """The fast products that other tests use differ from torch's own slow ones by the order of summation only."""
    torch.manual_seed(0)
    a, b = torch.randn(9, 40).to(dtype), torch.randn(40, 7).to(dtype)
    exact = a.double() @ b.double()
    with fast_products():
        ours = (a @ b, torch.nn.functional.linear(a, b.t()), torch.bmm(a[None], b[None])[0])
    for product in ours:
        assert product.dtype == dtype
        assert (product.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
