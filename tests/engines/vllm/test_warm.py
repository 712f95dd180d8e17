"""Documents filled ahead of time by the command line are found by an engine that is started later."""

import json
import subprocess
import sys

import pytest

from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.warm import parse_options
from kvmosaic.vllm import LLM
from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_engine import DOCUMENTS, answer, prompt

CORPUS = [f"Report {number}: {DOCUMENTS[number % len(DOCUMENTS)]}" for number in range(20)]
TOO_LONG = "And so on. " * 60
"""For the engine that warms: with 256 positions, of which the sink prefix takes some 160."""


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A disk tier that the command filled, and what it said."""
    folder = tmp_path_factory.mktemp("warm")
    corpus, entries = folder / "corpus.jsonl", folder / "entries"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*CORPUS, TOO_LONG, CORPUS[0]]))
    options = "--enforce-eager --max-model-len 256 --block-size 32"
    command = [sys.executable, "-m", "kvmosaic.cli.main", "store", "warm", "smollm2-135m", corpus, "--json"]
    done = subprocess.run(
        [*command, "--dtype", "float32", "--disk-path", entries, "--vllm-options", options],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return entries, json.loads(done.stdout.splitlines()[-1])


def test_all_documents_are_found_by_another_engine(warmed):
    entries, result = warmed
    assert result.pop("filled_tokens") > 20 * 20  # more than a request of that engine can have
    assert result == {"documents": 22, "filled": 20, "known": 1, "too_long": 1, "lost": 0}
    assert len(list(entries.rglob("*.safetensors"))) == 20
    llm = LLM("smollm2-135m", enable_chunk_cache=True, miss_policy="never", disk_path=entries, **SMALL)
    for start in range(0, 20, 5):
        [output] = answer(llm, [prompt("Be brief.", CORPUS[start : start + 5][::-1])], report=True)
        chunks = output.kv_transfer_params["chunks"]
        assert [(chunk["status"], chunk["tier"]) for chunk in chunks] == [("cached", "disk")] * 5
    states = llm.collective_rpc("chunk_cache_warm_states", args=([[1, 2, 3]],))
    assert states == [["missing"]]


@pytest.mark.parametrize("options", ["--no-such-option", "--max-model-len many", "--quantization 'x"])
def test_options_that_vllm_does_not_know_are_one_line(options):
    with pytest.raises(ConfigError, match=r"^--vllm-options: .*$"):
        parse_options(options)


def test_options_as_vllm_serve_takes_them():
    assert parse_options("--max-model-len 2k --tensor-parallel-size=2") == {
        "max_model_len": 2000,
        "tensor_parallel_size": 2,
    }
