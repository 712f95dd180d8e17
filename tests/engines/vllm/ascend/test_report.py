"""The script for people with an NPU, run on a CPU: it reports exact results and failures."""

import sys

import pytest

from tests import ascend_report


def test_versions_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(ascend_report, "PACKAGES", ("torch", "no-such-package"))
    lines = list(ascend_report.versions())
    assert lines[1].startswith("torch 2.")
    assert lines[2] == "no-such-package is not installed"


def test_results_are_found_among_other_output():
    said = 'noise\\nASCEND-REPORT {\\"ratio\\": 1.0}\\nmore noise'
    assert ascend_report.ran([sys.executable, "-c", f'print("{said}")']) == '{"ratio": 1.0}'


def test_what_failed_is_in_the_report():
    text = ascend_report.ran([sys.executable, "-c", "print('ASCEND-REPORT 1'); raise RuntimeError('no NPU')"])
    assert text.startswith("1\nstatus 1;")
    assert text.endswith("RuntimeError: no NPU")


@pytest.mark.engine
def test_the_cases_of_the_report(standin, tiny_llama):
    small = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "block_size": 128}
    first, *cases = ascend_report.exactness(tiny_llama, num_gpu_blocks_override=64, **small)
    assert first == {"self-test": "passed"}
    assert [case["chunks"] for case in cases[1:]] == [["cached"] * 4] * 3
    assert cases[0]["same tokens"]
    assert cases[0]["largest difference"] < 1e-3
    assert cases[1]["mode"] == "reuse"
