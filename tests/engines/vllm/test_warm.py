"""An engine that is started later finds the documents that the command line filled ahead of time."""

import json

import pytest
from typer.testing import CliRunner

from kvmosaic.cli.main import app
from tests.engines.vllm.helpers import DOCUMENTS, answer, report, start

pytestmark = pytest.mark.engine

CORPUS = [f"Report {number}: {DOCUMENTS[number % len(DOCUMENTS)]}" for number in range(20)]
TOO_LONG = "And so on. " * 60
"""Options of the warming engine: 256 positions, of which the sink prefix takes about 160."""


@pytest.fixture(scope="module")
def warmed(tmp_path_factory, tiny_text):
    """A disk tier that the command filled, and its output."""
    folder = tmp_path_factory.mktemp("warm")
    corpus, entries = folder / "corpus.jsonl", folder / "entries"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*CORPUS, TOO_LONG, CORPUS[0]]))
    options = "--enforce-eager --max-model-len 256 --block-size 32"
    command = ["store", "warm", tiny_text, str(corpus), "--json", "--dtype", "float32", "--disk-path", str(entries)]
    done = CliRunner().invoke(app, [*command, "--vllm-options", options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return entries, json.loads(done.stdout.splitlines()[-1])


def test_all_documents_are_found_by_another_engine(warmed, tiny_text):
    entries, result = warmed
    assert result.pop("filled_tokens") > 20 * 20  # more than a request of that engine can have
    assert result == {"documents": 22, "filled": 20, "known": 1, "too_long": 1, "too_short": 0, "lost": 0}
    assert len(list(entries.rglob("*.safetensors"))) == 20
    llm = start(tiny_text, miss_policy="never", disk_path=entries, chunk_separator=None)
    for at in range(0, 20, 5):
        text = "\n".join(["Be brief.", *CORPUS[at : at + 5][::-1], "Which report is it?"])
        [output] = answer(llm, [text], report=True, documents=CORPUS)
        chunks = report(output)["chunks"]
        assert [(chunk["status"], chunk["tier"]) for chunk in chunks] == [("cached", "disk")] * 5
    states = llm.collective_rpc("chunk_cache_warm_states", args=([[1, 2, 3]],))
    assert states == [["missing"]]
