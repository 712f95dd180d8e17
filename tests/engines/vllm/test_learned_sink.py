"""A learned sink in vLLM: placed before chunks, never computed, and the same entries as in the embedded engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.learned_sink import LearnedSink, SinkAbout
from kvmosaic.engines.hf.model import HFModel
from kvmosaic.models.sink_file import load_sink, save_sink
from tests.engines.vllm.helpers import (
    ask,
    close,
    draw,
    join,
    note_passes,
    plain_answer,
    start,
    statuses,
    store,
    worker_side,
)
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.tiny import write_tiny_gemma, write_tiny_llama
from tests.entries import kv_of

pytestmark = pytest.mark.engine

TOKENS = 40
"""Tokens of the sink: a full block, and a few more that share a block with each chunk."""
SETTINGS: dict[str, Any] = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "max_model_len": 1024}


@pytest.fixture(scope="module")
def model(tiny_llama) -> HFModel:
    return HFModel(AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32))


@pytest.fixture(scope="module")
def sink(model, tmp_path_factory) -> Path:
    return write_sink(model, tmp_path_factory.mktemp("sink") / "sink.safetensors", TOKENS)


def write_sink(model: HFModel, path: Path, tokens: int) -> Path:
    """Write a sink of random numbers that are as large as those of tokens."""
    [(k, v)] = model.fill((), [draw(tokens)], 500)
    k, v = (part.clone() + 0.2 * part.std() * torch.randn_like(part) for part in (k, v))
    about = SinkAbout(model="tiny", kl_before=1, kl_after=1, kvmosaic="x")
    learned = LearnedSink(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(), model.witness(), about)
    save_sink(learned, path)
    return path


def settings(sink: Path, **more: Any) -> dict[str, Any]:
    return {**SETTINGS, "sink_prefix": f"learned:{sink}", **more}


def entries() -> dict[tuple[int, ...], Any]:
    """Stored chunks, by their tokens."""
    found = [store()._stack.tiers[0].get(info.key) for info in store().scan()]
    return {entry.tokens: entry for entry in found if entry.kind == "document"}


def prompt_of(documents: list[list[int]]) -> tuple[list[int], dict[str, Any]]:
    ids, boundaries = join([draw(9), *documents, draw(6)])
    return ids, {"boundaries": boundaries, "report": True}


def same_entry(entry: Any, tokens: tuple[int, ...], model: HFModel, sink: LearnedSink) -> None:
    [theirs] = model.fill((), [tokens], 500, sink=sink.kv(torch.float32, torch.device("cpu")))
    for ours, wanted in zip(kv_of(entry), theirs, strict=True):
        torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_entries_are_those_of_the_embedded_engine(tiny_llama, model, sink, monkeypatch):
    llm = start(tiny_llama, **settings(sink))
    assert worker_side().off_reason is None
    documents = [draw(length) for length in (20, 37, 64, 90)]
    ids, params = prompt_of(documents)
    computed = note_passes(monkeypatch)
    [first] = ask(llm, ids, **params)
    # The sink is placed: besides the chunks, the first request computes its own text, and answers.
    assert sum(computed) <= sum(map(len, documents)) + len(ids)
    assert statuses(first) == ["filled"] * 4
    found = entries()
    assert found.keys() >= {tuple(document) for document in documents}
    for document in documents:
        same_entry(found[tuple(document)], tuple(document), model, load_sink(sink))
    # With everything recomputed, the result is a full prefill.
    [exact] = ask(llm, ids, recompute_ratio=1.0, **params)
    close(exact, plain_answer(llm, ids))


def test_in_the_background_and_in_slices(tiny_llama, model, sink):
    """One of the documents takes several steps."""
    more = {"miss_policy": "background", "max_num_batched_tokens": 128, "max_num_seqs": 8}
    llm = start(tiny_llama, **settings(sink, **more))
    documents = [draw(30), draw(400)]
    ids, params = prompt_of(documents)
    ask(llm, ids, max_tokens=2, **params)
    for _ in range(40):
        ask(llm, draw(5), max_tokens=12)
        if len(entries()) == 2:
            break
    found = entries()
    assert found.keys() == {tuple(document) for document in documents}
    for document in documents:
        same_entry(found[tuple(document)], tuple(document), model, load_sink(sink))


def answers(llm: Any, ids: list[int], params: dict[str, Any]) -> list[list[int]]:
    """Answers with chunks that are first filled, then reused, then partly recomputed."""
    given = [params, params, {**params, "recompute_ratio": 0.2, "policy": "sink-link"}]
    return [list(ask(llm, ids, salt=f"{index}", **each)[0].outputs[0].token_ids) for index, each in enumerate(given)]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU")
def test_two_ranks_answer_as_one(tiny_llama, sink):
    ids, params = prompt_of([draw(length) for length in (20, 37, 64)])
    with EngineApart(tiny_llama, ranks=2, **settings(sink)) as two:
        theirs = two.call(answers, ids, params)
    assert answers(start(tiny_llama, **settings(sink)), ids, params) == theirs


def test_layers_with_a_sliding_window(tmp_path):
    """Entries keep only the last tokens in such layers, and the sink is longer than that."""
    folder = write_tiny_gemma(tmp_path / "gemma", window=32)
    model = HFModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    path = write_sink(model, tmp_path / "sink", tokens=100)
    llm = start(folder, **settings(path))
    assert worker_side().off_reason is None
    documents = [draw(length) for length in (20, 45, 120)]
    ids, params = prompt_of(documents)
    ask(llm, ids, **params)
    found = entries()
    for document in documents:
        [(k, v)] = model.fill((), [document], 500, sink=load_sink(path).kv(torch.float32, torch.device("cpu")))
        entry = found[tuple(document)]
        for layer in range(model.format.layers):
            for ours, theirs in zip(entry.layer(layer), (k[:, layer], v[:, layer]), strict=True):
                wanted = theirs[:, theirs.shape[1] - ours.shape[1] :]
                torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_a_sink_of_another_model_is_refused(tmp_path, sink):
    other = write_tiny_llama(tmp_path / "other", hidden_size=128)
    with pytest.raises(Exception, match="learned for tiny") as caught:
        start(other, **settings(sink))
    assert isinstance(caught.value, ConfigError) or "ConfigError" in repr(caught.value)
