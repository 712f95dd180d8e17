"""A directory to which others write while this engine runs: requests find entries that the engine did not know."""

import os
import subprocess
import sys

import pytest

from kvmosaic.core.store_key import STORE_KEY_VARIABLE
from tests.engines.vllm.helpers import (
    DOCUMENTS,
    PART,
    answer,
    ask,
    draw,
    forget,
    greedy,
    has_company,
    join,
    plain,
    report,
    start,
    store,
)
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.tiny import write_tiny_llama

pytestmark = pytest.mark.engine

SETTINGS = {"chunk_separator": None, "min_chunk_tokens": 16, "prefix_blocks": True}
FROM_DISK = [("cached", "disk")]
NOT_STORED = ("plain", "not-stored")


def about(documents, system="Be brief."):
    return "\n".join([system, *documents, "Tell me about it. It is"])


def reuse(llm, documents, system="You are helpful."):
    """Have a request reuse documents in another order. Returns the distinct states of its documents."""
    [output] = answer(llm, [about(documents[::-1], system)], report=True, documents=documents)
    return sorted({(chunk["status"], chunk["tier"]) for chunk in report(output)["chunks"]})


def fallback(llm, documents):
    [output] = answer(llm, [about(documents)], report=True, documents=documents)
    return report(output)["mode"], report(output)["fallback_reason"]


def fill(llm, documents):
    """Fill documents. They are on the disk when the engine has ended."""
    answer(llm, [about(documents)], documents=documents)


def numbered(word):
    """Documents that no other test has. They differ behind their first word, which is no part of a chunk."""
    return [f"Number {number} is a {word}: {text}" for number, text in enumerate(DOCUMENTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("entries")


@pytest.fixture(scope="module")
def llm(folder, tiny_text):
    """It has served a request before others write."""
    engine = start(tiny_text, disk_path=folder, **SETTINGS)
    ask(engine, draw(5))
    return engine


def test_documents_that_the_command_stored_meanwhile(llm, folder, tiny_text, tmp_path):
    for number, text in enumerate(DOCUMENTS):
        tmp_path.joinpath(f"{number}.txt").write_text(text)
    command = [sys.executable, "-m", "kvmosaic.cli.main", "store", "warm", tiny_text, str(tmp_path)]
    options = ["--disk-path", str(folder), "--dtype", "float32"]
    engine = ["--vllm-options", "--enforce-eager --max-model-len 512 --block-size 32"]
    done = subprocess.run([*command, *options, *engine], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert reuse(llm, DOCUMENTS) == FROM_DISK
    assert reuse(llm, DOCUMENTS, "And again.") == [("cached", store().fastest_tier)]
    assert llm.get_stats()["hits_by_tier"]["disk"] == len(DOCUMENTS)


def test_documents_and_prefixes_that_another_server_stored_meanwhile(llm, folder, tiny_text):
    tokens, documents = draw(3 * PART + 40), numbered("note")
    with EngineApart(tiny_text, disk_path=folder, miss_policy="fill-first", **SETTINGS) as other:
        [expected] = other.call(ask, tokens)
        other.call(fill, documents)
        other.call(forget)
    assert reuse(llm, documents) == FROM_DISK
    [output] = ask(llm, tokens)
    assert output.num_cached_tokens == 3 * PART
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_documents_that_nobody_stored_are_prefilled(llm):
    assert fallback(llm, numbered("novelty")) == NOT_STORED


def test_only_engines_with_the_same_store_key_share(tiny_text, tmp_path, monkeypatch):
    monkeypatch.setenv(STORE_KEY_VARIABLE, "a secret that both engines have")
    llm = start(tiny_text, disk_path=tmp_path, **SETTINGS)
    ask(llm, draw(5))
    with EngineApart(tiny_text, disk_path=tmp_path, miss_policy="fill-first", **SETTINGS) as other:
        other.call(fill, DOCUMENTS)
    monkeypatch.setenv(STORE_KEY_VARIABLE, "a secret that only one engine has")
    with EngineApart(tiny_text, disk_path=tmp_path, miss_policy="fill-first", **SETTINGS) as stranger:
        stranger.call(fill, numbered("note"))
    assert len(list(tmp_path.rglob("*.safetensors"))) >= 2 * len(DOCUMENTS)
    assert fallback(llm, numbered("note")) == NOT_STORED
    assert reuse(llm, DOCUMENTS) == FROM_DISK


def test_a_busy_engine_finds_documents_once_it_has_seen_one_of_others(tiny_text, tmp_path):
    """Until then, its requests do not wait for an answer of the disk."""
    llm = start(tiny_text, disk_path=tmp_path, **SETTINGS)
    ask(llm, draw(5))
    first, second = DOCUMENTS[:2], DOCUMENTS[2:]
    with EngineApart(tiny_text, disk_path=tmp_path, miss_policy="fill-first", **SETTINGS) as other:
        other.call(fill, DOCUMENTS)
    engine, told = llm.llm_engine, {}

    def step():
        for output in engine.step():
            if output.finished:
                told[output.request_id] = report(output)

    def serve(name, documents):
        params = {"documents": documents, "report": True}
        engine.add_request(name, about(documents), greedy(10, params=params))
        while name not in told:
            step()
        return told[name]

    engine.add_request("runs", "A long story about", greedy(1500, params={"report": True}))
    step()
    served = serve("first", first)
    assert (served["mode"], served["fallback_reason"]) == NOT_STORED
    while not store().has_company:  # its documents are filled in the background
        step()
        assert "runs" not in told
    step()
    served = serve("second", second)
    assert "runs" not in told
    assert [(chunk["status"], chunk["tier"]) for chunk in served["chunks"]] == FROM_DISK * 2
    engine.abort_request(["runs"])
    plain(llm, ["And so on"])


def move(source, target, names):
    """Have complete files appear, as if another server had written them."""
    for path in source.rglob("*.safetensors"):
        if names(path.name):
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)


def test_each_rank_finds_its_own_heads(tiny_text, tmp_path):
    """A document of which one rank lacks its heads is missing."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    settings = {**SETTINGS, "miss_policy": "fill-first"}
    with EngineApart(tiny_text, ranks=2, disk_path=theirs, **settings) as other:
        other.call(fill, DOCUMENTS)
        other.call(forget)
        assert not other.call(has_company)
    heads = {path.stem.split("-", 2)[2] for path in theirs.rglob("*.safetensors")}
    assert len(heads) == 2
    with EngineApart(tiny_text, ranks=2, disk_path=ours, **settings) as engine:
        engine.call(ask, draw(5))
        move(theirs, ours, lambda name: min(heads) in name)
        assert engine.call(reuse, DOCUMENTS[:2]) == [("filled", None)]
        move(theirs, ours, lambda name: True)
        assert engine.call(reuse, DOCUMENTS[2:]) == FROM_DISK
        assert engine.call(has_company)


def fill_tokens(llm, documents):
    ids, boundaries = join([[12] * 9, *documents, [7, 8, 9]])
    ask(llm, ids, boundaries=boundaries)
    llm.collective_rpc(flush)


def flush(worker):
    """Wait until a rank has written everything."""
    store().flush()


def test_ranks_with_the_same_heads_are_no_company(tmp_path):
    """They write the same files: the second one finds those of the first."""
    model = write_tiny_llama(tmp_path / "model", kv_heads=1)
    settings = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_model_len": 1024}
    with EngineApart(model, ranks=2, disk_path=tmp_path / "entries", **settings) as engine:
        engine.call(fill_tokens, [draw(length) for length in (40, 50, 60, 70, 80)])
        engine.call(forget)
        assert not engine.call(has_company)
