"""Layers with a sliding window: only what later tokens can see of them is stored, and nothing else changes."""

import json
import random
import subprocess
import sys

import pytest

from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.tiny import write_tiny_gemma

WINDOW, BLOCK = 60, SMALL["block_size"]
TAIL, PART = 64, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_gemma(tmp_path_factory.mktemp("model") / "gemma", WINDOW)


def run(**arguments):
    command = [sys.executable, "-m", "tests.engines.vllm.window_run", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_less_is_stored_and_nothing_else_changes(model):
    arguments = {
        "model": model,
        "seed": random.randrange(10**6),
        "part": PART,
        "vocabulary": 500,
        "skip_tokenizer_init": True,
    }
    tails, whole = (run(**arguments, window_tails=each) for each in (True, False))
    assert tails["cached"] == whole["cached"]
    assert sum(whole["cached"]) > 0
    assert tails["answers"] == whole["answers"]
    # Four of six layers keep a quarter of each part.
    assert tails["prefix_bytes"] / whole["prefix_bytes"] == pytest.approx((2 + 4 * TAIL / PART) / 6, rel=0.02)
    assert tails["chunk_bytes"] < 0.7 * whole["chunk_bytes"]
