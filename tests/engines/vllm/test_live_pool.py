"""A pool that other engines write to while this one runs: it finds entries that it did not know."""

import pytest

from tests.engines.vllm.helpers import DOCUMENTS, PART, ask, draw, forget, prompt, report, start
from tests.engines.vllm.processes import EngineApart
from tests.store.remote_servers import Valkey

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    server = Valkey(tmp_path_factory.mktemp("pool"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def llm(pool, tiny_text):
    return start(tiny_text, prefix_blocks=True, remote=pool.url)


@pytest.fixture(scope="module")
def text():
    return prompt("You are helpful.", DOCUMENTS)


@pytest.fixture(scope="module")
def written(llm, pool, text, tiny_text):
    """Data that another engine stored after ours had started and served its first request: a prompt's tokens and its
    answer, and the documents of a text."""
    ask(llm, draw(5))
    tokens = draw(808)
    with EngineApart(tiny_text, prefix_blocks=True, remote=pool.url, miss_policy="fill-first") as other:
        [output] = other.call(ask, tokens)
        other.call(ask, llm.get_tokenizer().encode(text))
        other.call(forget)
    return tokens, output.outputs[0].token_ids


def test_documents_that_another_engine_filled_meanwhile(llm, written, text):
    [output] = ask(llm, llm.get_tokenizer().encode(text), report=True)
    assert {(chunk["status"], chunk["tier"]) for chunk in report(output)["chunks"]} == {("cached", "remote")}


def test_prefixes_that_another_engine_computed_meanwhile(llm, written):
    tokens, expected = written
    [output] = ask(llm, tokens)
    assert output.num_cached_tokens == 3 * PART
    assert output.outputs[0].token_ids == expected


def test_a_pool_that_dies_costs_an_answer_nothing_but_a_moment(llm, pool, written):
    pool.kill()
    tokens = draw(2 * PART + 9)
    [output] = ask(llm, tokens, max_tokens=2)
    assert output.num_cached_tokens == 0
    [new] = ask(
        llm, llm.get_tokenizer().encode(prompt("You are helpful.", [f"New: {d}" for d in DOCUMENTS])), report=True
    )
    assert (report(new)["mode"], report(new)["fallback_reason"]) == ("plain", "not-stored")
