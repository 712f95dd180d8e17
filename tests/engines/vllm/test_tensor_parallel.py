"""Two tensor-parallel ranks for real: each has its own heads and its own store, and they must agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engines.vllm.tiny import write_tiny_llama

# Two ranks need two cores each to themselves, or two GPUs.
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU")


def answers(folder, ranks):
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the program sends its workers a function
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        **(TWO_CORES if ranks > 1 else {}),
    }
    program = [sys.executable, str(Path(__file__).with_name("tensor_parallel.py")), folder, str(ranks)]
    run = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.parametrize("kv_heads", [4, 1], ids=["split heads", "more ranks than heads"])
def test_two_ranks_answer_as_one(tmp_path, kv_heads):
    folder = write_tiny_llama(tmp_path, kv_heads)
    two, one = answers(folder, 2), answers(folder, 1)
    assert two["heads"] == (["0-1of4", "2-3of4"] if kv_heads == 4 else ["0-0of1", "0-0of1"])
    assert two["all"] == two["plain"] == one["plain"] == two["in_slices"]
    assert two["slices"][0] == two["slices"][1] > 1
    for case in ("filled", "moved", "asked", "checked", "one_rank_forgot", "reused_again"):
        assert two[case][0] == one[case][0], case
    assert 0 < two["asked"][1] < two["document_tokens"]
    cached = {case: two[case][1] for case in ("filled", "moved", "one_rank_forgot", "reused_again")}
    assert cached["filled"] == 0
    assert cached["moved"] == cached["reused_again"] == two["document_tokens"]
    assert 0 < cached["one_rank_forgot"] < two["document_tokens"]
    assert one["one_rank_forgot"][1] == two["document_tokens"]
