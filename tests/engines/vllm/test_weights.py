"""Weights that change in a running engine: KV of the old weights is not served, and KV of the new ones has other
names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmosaic.engines.vllm.worker_side import names
from kvmosaic.engines.vllm.worker_side import weights as engine_weights
from tests.engines.vllm.helpers import (
    PART,
    ask,
    close,
    draw,
    exact,
    fail,
    forget,
    join,
    report,
    start,
    statuses,
    store,
    worker_side,
)
from tests.engines.vllm.processes import EngineApart

pytestmark = pytest.mark.engine

SETTINGS = {"miss_policy": "fill-first", "skip_tokenizer_init": True, "prefix_blocks": True}
LOADABLE = ("embed_tokens", "norm")
"""On a CPU, vLLM packs all other weights when they are loaded, and ``load_weights`` cannot replace those."""


@pytest.fixture(scope="module")
def folders(tiny_llama, tmp_path_factory):
    """Two folders with different weights. In the first, those differ that ``load_weights`` can replace; in the
    second, the others."""
    weights = load_file(Path(tiny_llama) / "model.safetensors")
    folders = []
    for is_loadable in (True, False):
        folder = tmp_path_factory.mktemp("models") / "other"
        folder.mkdir()
        (folder / "config.json").write_text((Path(tiny_llama) / "config.json").read_text())
        turned = {
            name: value.flip(-1).contiguous() if loadable(name) == is_loadable else value
            for name, value in weights.items()
        }
        save_file(turned, folder / "model.safetensors")
        folders.append(str(folder))
    return folders


def loadable(name: str) -> bool:
    return any(part in name for part in LOADABLE)


@pytest.fixture(scope="module")
def prompts():
    """Two prompts of the same documents, and one without any."""
    documents = [draw(length) for length in (40, 70, 55)]
    question = draw(7)
    first = join([draw(21), *documents, question])
    second = join([draw(33), *documents[::-1], question])
    return first, second, draw(PART + 40)


def answers(llm, prompts):
    """Answers of an engine to all prompts, with nothing from vLLM's own prefix cache."""
    (first, first_parts), (second, second_parts), plain = prompts
    outputs = []
    for ids, params in [
        (first, {"boundaries": first_parts}),
        (second, {"boundaries": second_parts}),
        (second, {"boundaries": second_parts, "recompute_ratio": 0.4, "policy": "kv-deviation(layers=0)"}),
        (plain, {}),
        (plain, {}),
    ]:
        outputs += ask(llm, ids, report=True, **params)
        forget(llm)
    return outputs


def all_close(ours, theirs):
    for mine, yours in zip(ours, theirs, strict=True):
        close(mine, yours)


def load_from(folder):
    """Load a folder's weights in the way of RLHF code, as far as a CPU can."""

    def load(worker):
        weights = load_file(Path(folder) / "model.safetensors")
        some = [(name, value) for name, value in weights.items() if loadable(name)]
        worker.model_runner.model.load_weights(iter(some))

    return lambda llm: llm.collective_rpc(load)


def reload_from(folder):
    return lambda llm: llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def put_from(folder):
    """Write a folder's weights into the parameters' memory, without notice to the model."""

    def put(model):
        for name, value in load_file(Path(folder) / "model.safetensors").items():
            if loadable(name):
                model.get_parameter(name).data.copy_(value)

    return lambda llm: llm.collective_rpc("apply_model", args=(put,))


def write_from(folder):
    """The same, by a function that is sent to the worker."""

    def write(worker):
        for name, value in load_file(Path(folder) / "model.safetensors").items():
            if loadable(name):
                worker.get_model().get_parameter(name).data.copy_(value)

    return lambda llm: llm.collective_rpc(write)


class Trainer:
    """An extension of vLLM's worker."""

    def train(self, folder):
        for name, value in load_file(Path(folder) / "model.safetensors").items():
            if loadable(name):
                self.model_runner.model.get_parameter(name).data.copy_(value)


def train_from(folder):
    """The same, by a method of an extension class."""
    return lambda llm: llm.collective_rpc("train", args=(folder,))


EXTENDED = {"worker_extension_cls": f"{__name__}.Trainer"}


@pytest.mark.parametrize(
    ("change", "which", "more"),
    [
        (load_from, 0, {}),
        (reload_from, 1, {}),
        (put_from, 0, {}),
        (write_from, 0, {}),
        (train_from, 0, EXTENDED),
    ],
)
def test_kv_of_other_weights_is_not_served(tiny_llama, folders, prompts, change, which, more):
    other = folders[which]
    with_others = answers(start(other, **SETTINGS), prompts)
    llm = start(tiny_llama, **SETTINGS, **more)
    before = answers(llm, prompts)
    pinned = [info.key.content_hash.hex() for info in store().scan()]
    assert all(llm.collective_rpc("chunk_cache_pin", args=(digest, True)) == [1] for digest in pinned)
    assert [exact(output)[0] for output in before] != [exact(output)[0] for output in with_others]

    change(other)(llm)
    assert llm.reset_prefix_cache()
    all_close(answers(llm, prompts), with_others)
    assert not any(info.pinned for info in store().scan())  # with the old weights, they could not be named any more
    hits = llm.get_stats()["cache_hits"]
    all_close(answers(llm, prompts), with_others)
    assert llm.get_stats()["cache_hits"] > hits

    # Back to the first weights: only entries that were stored with them are found again.
    change(tiny_llama)(llm)
    assert llm.reset_prefix_cache()
    misses = llm.get_stats()["cache_misses"]
    again = answers(llm, prompts)
    all_close(again, before)
    assert set(statuses(again[1])) == {"cached"}
    assert llm.get_stats()["cache_misses"] == misses


def test_a_request_that_finishes_before_and_is_saved_after_the_change(tiny_llama, folders, prompts):
    """Its blocks are read a step after they were computed. KV of the old weights must not get the new name, and
    neither must KV from vLLM's own prefix cache, which was not emptied."""
    (*_, plain), other = prompts, folders[1]
    [expected] = ask(start(other, **SETTINGS), plain)
    llm = start(tiny_llama, **SETTINGS)
    [before] = ask(llm, plain, max_tokens=1)
    assert exact(before)[1] != exact(expected)[1][:1]
    reload_from(other)(llm)
    ask(llm, draw(2 * PART))
    ask(llm, plain)  # whatever vLLM makes of it: its prefix cache was not emptied
    ask(llm, draw(9))
    forget(llm)
    [after] = ask(llm, plain)
    close(after, expected)


def test_weights_put_back_by_hand_and_the_same_ones_loaded_again_change_nothing(tiny_llama, prompts):
    llm = start(tiny_llama, **SETTINGS)
    answers(llm, prompts)
    reload_from(tiny_llama)(llm)
    assert llm.reset_prefix_cache()
    [first, *_] = answers(llm, prompts)
    assert report(first)["mode"] == "reuse"
    assert set(statuses(first)) == {"cached"}


def test_weights_that_nobody_can_tell_are_in_no_tier_that_lasts(tiny_llama, prompts, tmp_path, monkeypatch):
    (ids, boundaries), _, plain = prompts
    lines = []
    monkeypatch.setattr(names.logger, "error", lambda line, *args: lines.append(line % args))
    llm = start(tiny_llama, **SETTINGS, disk_path=tmp_path)

    def told():
        outputs = [*ask(llm, ids, boundaries=boundaries, report=True), *ask(llm, plain)]
        forget(llm)
        worker_side().cache.store.flush()
        return report(outputs[0]), {path.name for path in tmp_path.rglob("*") if path.is_file()}

    _, files = told()
    assert files
    with monkeypatch.context() as patch:
        patch.setattr(engine_weights, "loaded_tensors", fail)
        reload_from(tiny_llama)(llm)
        assert llm.reset_prefix_cache()
        for _ in range(3):
            said, there = told()
            assert there == files
        assert said == {"mode": "plain", "fallback_reason": "unknown-weights"}
        assert worker_side().names.tiers == "none"
    [line] = lines
    assert "a failure made for this test" in line
    reload_from(tiny_llama)(llm)
    assert llm.reset_prefix_cache()
    told()
    assert {chunk["status"] for chunk in told()[0]["chunks"]} == {"cached"}


def only_the_first_rank_knows(worker):
    """The other rank's weights change in a way that is not watched."""
    side = worker_side()
    if side.ranks.rank > 0:
        side.weights._may_have_changed = False
    return side.weights.identity


def answers_of_ranks(llm, ids, boundaries, folders):
    """Answers of two ranks with the weights of one folder after the other, and the ranks' names for those weights."""
    said, called = [], []
    for folder in folders:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        llm.collective_rpc(only_the_first_rank_knows)
        assert llm.reset_prefix_cache()
        said += [[list(output.outputs[0].token_ids) for output in ask(llm, ids, boundaries=boundaries)] for _ in "12"]
        called.append(llm.collective_rpc(only_the_first_rank_knows))
    return said, called


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU")
def test_ranks_change_weights_in_the_same_step(tiny_llama, folders, prompts):
    (ids, boundaries), *_ = prompts
    order = [tiny_llama, folders[1], tiny_llama]
    with EngineApart(tiny_llama, ranks=2, **SETTINGS) as engine:
        said, called = engine.call(answers_of_ranks, ids, boundaries, order)
    for folder, first, second in zip(order, said[::2], said[1::2], strict=True):
        [alone] = ask(start(folder, **SETTINGS), ids, boundaries=boundaries)
        assert first == second == [list(alone.outputs[0].token_ids)]
    assert all(mine == yours for mine, yours in called)
    assert called[0] == called[2] != called[1]
