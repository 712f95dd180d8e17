"""Failures inside the chunk cache: the engine continues, the answer is that of a plain prefill, and the failure is
counted."""

import random

import pytest

from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.scheduler_side import waiting
from tests.engines.vllm.helpers import (
    PART,
    ask,
    close,
    draw,
    fail,
    forget,
    greedy,
    is_idle,
    join,
    plain_answer,
    report,
    scheduler_side,
    set_miss_policy,
    start,
    worker_side,
)

pytestmark = pytest.mark.engine

PROBING = {"recompute_ratio": 0.5, "policy": "kv-deviation(layers=0)"}


@pytest.fixture(scope="module")
def llm(tiny_llama):
    return start(tiny_llama, miss_policy="fill-first", skip_tokenizer_init=True, prefix_blocks=True)


@pytest.fixture
def documents(llm):
    """Three documents, two of which are stored."""
    documents = [draw(length) for length in (40, 70, 55)]
    ids, boundaries = join([draw(9), *documents[:2], draw(5)])
    ask(llm, ids, boundaries=boundaries)
    return documents


@pytest.fixture
def errors(monkeypatch):
    """The stages that fail from now on, on both sides."""
    noted = []
    from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats

    count = ChunkStats.count

    def noting(self, name, label, amount=1):
        if name == "errors":
            noted.append(str(label))
        count(self, name, label, amount)

    monkeypatch.setattr(ChunkStats, "count", noting)
    return noted


def once(function):
    """The function, made to fail the first time."""
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        return fail() if len(calls) == 1 else function(*args, **kwargs)

    return failing


def attention(side):
    """The backend of a layer in the middle."""
    return side.forward.kv.layers[1].module.impl


WORKER = {
    "lookup": lambda side: (side.cache.store, "lookup", fail),
    "pin": lambda side: (side.cache.store, "pin", fail),
    "fetched": lambda side: (side.fetcher, "kept_for", fail),
    "fill": lambda side: (side.paged, "fill", fail),
    "place": lambda side: (side.paged, "place", fail),
    "probe": lambda side: (side.forward, "probe", fail),
    "compute": lambda side: (side.paged, "compute", once(side.paged.compute)),
    "model": lambda side: (attention(side), "forward", once(attention(side).forward)),
    "put": lambda side: (side.cache.store, "put", fail),
    "statistics": lambda side: (side.cache.store, "held", fail),
    "changes": lambda side: (side.cache.store, "take_changes", fail),
}


NOTHING_MISSING = ("compute", "model")
"""Stages that fail once while no chunk is missing, because otherwise the fill would fail."""


@pytest.mark.parametrize("params", [{"recompute_ratio": 1.0}, PROBING], ids=["all", "probing"])
@pytest.mark.parametrize("stage", WORKER)
def test_a_worker_that_fails(llm, documents, errors, monkeypatch, stage, params):
    """At ratio 1.0 the answer is always that of a plain prefill. With a probing policy it is so only if the probe
    failed. Otherwise the answer may be any, but the engine has to continue and the next answer has to be right."""
    used = documents[:2] if stage in NOTHING_MISSING else documents
    ids, boundaries = join([draw(45), *random.sample(used, len(used)), draw(7)])
    with monkeypatch.context() as patch:
        patch.setattr(*WORKER[stage](worker_side()))
        [output] = ask(llm, ids, boundaries=boundaries, **params)
        assert len(output.outputs[0].token_ids) == 8
    exact = plain_answer(llm, ids)
    if params == PROBING and stage in ("place", "probe"):
        close(output, exact)
    if params != PROBING:
        close(output, exact)
        assert errors or stage in ("probe", "fetched")
    ids, boundaries = join([draw(33), *documents, draw(7)])
    [after] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0)
    close(after, plain_answer(llm, ids))
    assert is_idle(llm)
    assert worker_side().cache.get_stats()["pinned"] == 0


@pytest.mark.parametrize("is_in_slices", [False, True])
def test_a_request_that_always_fails_is_prefilled_alone(llm, errors, monkeypatch, is_in_slices):
    """Its chosen tokens cannot be computed, together with others or alone. The other request of the step is served as
    without the failure."""
    documents, mark = [draw(length) for length in (40, 70, 55)], 505
    bad, bad_boundaries = join([[mark] * 45, *documents, draw(7)])
    good, good_boundaries = join([draw(45), documents[0], documents[2], draw(7)])
    ours = {"recompute_ratio": 0.5, "policy": "random"}
    ask(llm, bad, boundaries=bad_boundaries, recompute_ratio=0)
    [expected] = ask(llm, good, boundaries=good_boundaries, **ours)
    assert llm.reset_prefix_cache()
    side, marked, counted = worker_side(), [], []
    compute, count = side.paged.compute, side.stats.count_alike

    def failing(runs, *given):
        marked.extend(run.blocks for run in runs if mark in run.tokens)
        is_bad = any(run.blocks in marked for run in runs)
        return fail() if is_bad and len(runs) > 1 else compute(runs, *given)

    def counting(name, *about):
        counted.append((name, *about))
        count(name, *about)

    with monkeypatch.context() as patch:
        patch.setattr(side.paged, "compute", failing)
        patch.setattr(side.stats, "count_alike", counting)
        if is_in_slices:
            patch.setattr(scheduler_side(llm)._admission, "is_long", lambda *_: True)
            patch.setattr(scheduler_side(llm)._admission, "slice_tokens", lambda *_: 60)
            llm.llm_engine.add_request("decodes", {"prompt_token_ids": draw(20)}, greedy(40))
        prompts = [{"prompt_token_ids": ids} for ids in (bad, good)]
        params = [
            greedy(8, logprobs=3, detokenize=False, params={"boundaries": each, **ours})
            for each in (bad_boundaries, good_boundaries)
        ]
        outputs = {}
        for name, prompt, each in zip("ab", prompts, params, strict=True):
            llm.llm_engine.add_request(name, prompt, each)
        while llm.llm_engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
    assert "compute" in errors
    assert [reason for name, reason, *_ in counted if name == "fallbacks"] == [Fallback.ERROR]
    close(outputs["a"], plain_answer(llm, bad))
    close(outputs["b"], expected)
    assert is_idle(llm)
    assert not side.loader.slices
    assert not side.loader.slices._loads


def test_chunks_that_cannot_be_stored_are_used_once(llm, errors, monkeypatch):
    """This includes the other chunks of the request."""
    ids, boundaries = join([draw(45), draw(70), draw(80), draw(7)])
    with monkeypatch.context() as patch:
        patch.setattr(worker_side().cache.store, "put", fail)
        [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.0, report=True)
    assert set(errors) == {"store"}
    assert [chunk["status"] for chunk in report(output)["chunks"]] == ["filled", "filled"]


def test_beside_a_request_that_decodes_nobody_waits_for_chunks_that_cannot_be_stored(llm, errors, monkeypatch):
    """They are more than the step beside it has room for, so they are filled in the background first."""
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 1e6)
    engine, outputs = llm.llm_engine, {}
    ids, boundaries = join([draw(45), *(draw(180) for _ in range(3)), draw(7)])
    with monkeypatch.context() as patch:
        patch.setattr(worker_side().cache.store, "put", fail)
        patch.setattr(scheduler_side(llm)._admission, "tokens_worth_filling", lambda: 100)
        engine.add_request("decodes", {"prompt_token_ids": draw(20)}, greedy(400))
        while not engine.step():  # until it decodes
            pass
        engine.add_request(
            "lacks", {"prompt_token_ids": ids}, greedy(2, params={"boundaries": boundaries, "report": True})
        )
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
    assert list(outputs) == ["lacks", "decodes"]
    assert set(errors) == {"store"}
    assert [chunk["status"] for chunk in report(outputs["lacks"])["chunks"]] == ["prefilled"] * 3
    assert is_idle(llm)


def test_chunks_cannot_be_forgotten(llm, documents, errors, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(worker_side().cache.store, "empty_memory", fail)
        assert llm.reset_prefix_cache(reset_connector=True)
        ids, boundaries = join([draw(33), *documents, draw(7)])
        [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0)
    assert "clear" in errors
    close(output, plain_answer(llm, ids))


@pytest.mark.parametrize("stage", ["lookup", "place", "read"])
def test_exact_prefixes_that_fail(llm, errors, monkeypatch, stage):
    ids = draw(PART + 50)
    with monkeypatch.context() as patch:
        if stage == "read":
            patch.setattr(worker_side().paged, stage, fail)
        [before] = ask(llm, ids)
        forget(llm)
        if stage != "read":
            patch.setattr(*WORKER[stage](worker_side()))
        [output] = ask(llm, ids)
    close(output, before)
    assert errors


SCHEDULER = {
    "plan": ("_planner", "plan"),
    "exact": ("_exact", "enough"),
    "waiting": ("_waiting", "matched"),
    "worth": ("_admission", "is_faster"),
    "room": ("_admission", "has_room"),
    "tokens": ("_admission", "_load_cost"),
    "admit": ("_admission", "admit"),
    "lend": ("_lender", "lend"),
    "mirror": ("_mirror", "tier"),
    "backlog": ("_backlog", "take"),
    "costs": ("_admission", "measured"),
    "prefix": ("prefixes", "matched"),
    "saves": ("prefixes", "due"),
    "ends": ("prefixes", "finished"),
}


@pytest.mark.parametrize("stage", SCHEDULER)
def test_a_scheduler_that_fails(llm, documents, errors, monkeypatch, stage):
    part, method = SCHEDULER[stage]
    set_miss_policy(monkeypatch, llm, "background")
    ids, boundaries = join([draw(45), *random.sample(documents, 3), draw(7)])
    other = draw(40)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_side(llm)._admission, "is_faster", lambda *_: True)  # whatever was measured
        patch.setattr(getattr(scheduler_side(llm), part), method, fail)
        [output] = ask(llm, ids, boundaries=boundaries, recompute_ratio=1.0, report=True)
        [alone] = ask(llm, other)
    close(output, plain_answer(llm, ids))
    close(alone, plain_answer(llm, other))
    assert errors
    assert is_idle(llm)
    assert worker_side().cache.get_stats()["pinned"] == 0
