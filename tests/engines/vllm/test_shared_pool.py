"""Engines of different tensor-parallel sizes, for real, that serve one another's documents from a shared pool."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvmosaic.store.tiers.remote import open_remote_tier
from tests.engines.vllm.test_tensor_parallel import ROOT, TWO_CORES
from tests.engines.vllm.tiny import write_tiny_llama
from tests.store.remote_servers import Mooncake, Valkey

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU"),
    pytest.mark.timeout(1800),  # engines are started one after the other, and one takes minutes on a busy machine
]

FILLED = [["filled", None]] * 5
FROM_POOL = [["cached", "remote"]] * 5


def run(model, ranks, url, *sets, conversations=None):
    """What an engine in a process of its own makes of these sets of documents, and of conversations."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the program sends its workers a function
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        **(TWO_CORES if ranks > 1 else {}),
    }
    program = [sys.executable, str(Path(__file__).with_name("shared_pool.py")), model, str(ranks), url]
    done = subprocess.run(
        [*program, ",".join(map(str, sets)), json.dumps(conversations or {})],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model):
    """What an engine says that knows no pool; one of two ranks says the same (``test_tensor_parallel.py``)."""
    return run(model, 1, "none", 1, 2)


@pytest.fixture(scope="module")
def turns(model, alone):
    """What it says when the conversations go on."""
    said = run(model, 1, "none", 1, 2, conversations={number: alone[number]["conversation"] for number in ("1", "2")})
    return {number: said[number]["turn"] for number in ("1", "2")}


@pytest.mark.parametrize("kind", [Valkey, Mooncake], ids=lambda kind: kind.kind)
def test_each_size_serves_what_the_other_computed(tmp_path, model, alone, turns, kind):
    pool = kind(tmp_path)
    try:
        two = run(model, 2, pool.url, 1)
        one = run(model, 1, pool.url, 1, 2, conversations={"1": two["1"]["conversation"]})
        two_again = run(model, 2, pool.url, 2, conversations={"2": one["2"]["conversation"]})
    finally:
        pool.kill()
    # By a prefill and by decoding, at one size, and served at the other.
    assert one["1"]["cached"] == two_again["2"]["cached"] == 512
    assert (one["1"]["turn"], two_again["2"]["turn"]) == (turns["1"], turns["2"])
    assert two["ranks"] == two_again["ranks"] == [["0-1of4L0-2", 0], ["2-3of4L0-2", 0]]
    assert one["ranks"] == [["0-3of4L0-2", 0]]
    assert two["1"]["fate"] == one["2"]["fate"] == alone["1"]["fate"] == alone["2"]["fate"] == FILLED
    assert one["1"]["fate"] == two_again["2"]["fate"] == FROM_POOL
    assert one["1"]["answers"] == alone["1"]["answers"]
    assert two_again["2"]["answers"] == alone["2"]["answers"]
    assert alone["1"]["answers"] != alone["2"]["answers"]  # so that equal ones mean something


def test_more_ranks_than_heads(tmp_path):
    """One of the two writes, both read."""
    model = write_tiny_llama(tmp_path / "model", kv_heads=1)
    pool = Valkey(tmp_path)
    try:
        two = run(model, 2, pool.url, 1)
        tier = open_remote_tier(pool.url, 10)
        stored = list(tier.scan())
        tier.close()
        two_again = run(model, 2, pool.url, 1)
    finally:
        pool.kill()
    assert two["ranks"] == [["0-0of1L0-2", 0]] * 2
    assert {info.key.heads for info in stored} == {"0-0of1L0-2"}
    assert two["1"]["fate"] == FILLED
    assert two_again["1"]["fate"] == FROM_POOL
    assert two["1"]["answers"] == two_again["1"]["answers"]
