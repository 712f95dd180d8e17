"""A pool that other engines write to while this one runs: it finds what it never heard of."""

import json
import subprocess
import sys

import pytest

from tests.engines.vllm.test_engine import DOCUMENTS, prompt
from tests.engines.vllm.test_prefix_blocks import PART, ask, draw, start
from tests.store.remote_servers import Valkey

WRITER = """
import json, sys
from tests.engines.vllm.test_prefix_blocks import ask, draw, forget, start
llm = start(remote=sys.argv[1], miss_policy="fill-first")
tokens = draw(808)
[output] = ask(llm, tokens)
ask(llm, llm.get_tokenizer().encode(sys.argv[2]))
forget(llm)
llm.llm_engine.engine_core.shutdown()
print(json.dumps({"tokens": tokens, "answer": list(output.outputs[0].token_ids)}))
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    server = Valkey(tmp_path_factory.mktemp("pool"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def llm(pool):
    return start(remote=pool.url, miss_policy="background")


@pytest.fixture(scope="module")
def text():
    return prompt("You are helpful.", DOCUMENTS)


@pytest.fixture(scope="module")
def written(llm, pool, text):
    """What another engine stored after ours had started and served its first request."""
    ask(llm, draw(5))
    run = subprocess.run([sys.executable, "-c", WRITER, pool.url, text], capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_documents_that_another_engine_filled_meanwhile(llm, written, text):
    [output] = ask(llm, llm.get_tokenizer().encode(text), report=True)
    chunks = output.kv_transfer_params["chunks"]
    assert {(chunk["status"], chunk["tier"]) for chunk in chunks} == {("cached", "remote")}


def test_prefixes_that_another_engine_computed_meanwhile(llm, written):
    [output] = ask(llm, written["tokens"])
    assert output.num_cached_tokens == 3 * PART
    assert list(output.outputs[0].token_ids) == written["answer"]


def test_a_pool_that_dies_costs_an_answer_nothing_but_a_moment(llm, pool, written):
    pool.kill()
    tokens = draw(2 * PART + 9)
    [output] = ask(llm, tokens, max_tokens=2)
    assert output.num_cached_tokens == 0
    [new] = ask(
        llm, llm.get_tokenizer().encode(prompt("You are helpful.", [f"New: {d}" for d in DOCUMENTS])), report=True
    )
    assert new.kv_transfer_params == {"mode": "plain", "fallback_reason": "cost"}
