"""What becomes of chunks that vLLM's workers have not stored: nobody's first answer is worse or slower for it."""

import random
import time

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvmosaic.engines.vllm import backlog
from kvmosaic.engines.vllm.messages import ChunkFill
from kvmosaic.engines.vllm.telemetry.cost import ENOUGH
from kvmosaic.vllm import LLM
from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_engine import DOCUMENTS, answer, plain, prompt, same
from tests.entries import kv_of


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", enable_chunk_cache=True, miss_policy="background", **SMALL)


def new_documents(count):
    return [f"Report {random.random()}: {random.choice(DOCUMENTS)}" for _ in range(count)]


def statuses(output):
    return [chunk["status"] for chunk in output.kv_transfer_params["chunks"]]


def test_new_documents_are_prefilled_exactly_and_filled_while_the_answer_is_decoded(llm):
    documents = new_documents(3)
    text = prompt("You are helpful.", documents)
    before = llm.get_stats()["total_chunks"]
    [first] = answer(llm, [text], report=True)
    assert first.kv_transfer_params == {"mode": "plain", "fallback_reason": "cost"}
    [exact] = plain(llm, [text])
    same(first, exact)
    assert llm.get_stats()["total_chunks"] - before >= 3
    [second] = answer(llm, [prompt("Another system prompt.", documents[::-1])], report=True)
    assert second.kv_transfer_params["mode"] == "reuse"
    assert statuses(second) == ["cached"] * 3


def test_a_prompt_that_was_blended_is_not_finished_as_plain(llm, monkeypatch):
    """vLLM's prefix cache has most of it; computing the rest as usual would be quicker, but no answer to anything."""
    documents = new_documents(3)
    answer(llm, [prompt("You are helpful.", documents)])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    partly = 0
    for number in range(6):  # it depends on the length whether a part of the last document is left to do
        text = prompt(f"Blended {random.random()}" + " again" * 5 * number, documents[::-1], "It is")
        [first] = answer(llm, [text], report=True, recompute_ratio=0.3, policy="random")
        assert first.kv_transfer_params["mode"] == "reuse"
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "_cost", lambda *_: 10**6)
            [again] = answer(llm, [text], report=True, recompute_ratio=0.3, policy="random")
        assert again.kv_transfer_params["mode"] == "reuse"
        same(again, first)
        partly += again.kv_transfer_params["chunks"][-1]["tier"] != "prefix-cache"
    assert partly


def test_a_new_document_among_known_ones(llm):
    known, new = new_documents(3), new_documents(1)
    answer(llm, [prompt("You are helpful.", known)])
    [output] = answer(llm, [prompt("Another one.", [*known[:2], *new, known[2]])], report=True)
    assert statuses(output) == ["cached", "cached", "prefilled", "cached"]
    [again] = answer(llm, [prompt("A third one.", [*known[:2], *new, known[2]])], report=True)
    assert statuses(again) == ["cached"] * 4


def test_what_is_filled_in_the_background_is_what_filling_first_stores(llm):
    documents = new_documents(3)
    answer(llm, [prompt("You are helpful.", documents)])
    worker = get_kv_transfer_group().loader
    store, sink = worker.cache.store, worker.cache.sink
    entries = [
        entry for entry in map(store_entry(store), store.scan()) if entry is not None and entry.context == sink
    ]
    mine = [entry for entry in entries if len(entry.tokens) > 5][-3:]
    worker._scratch = [list(range(1, 40))]
    for entry in mine:
        [(k, v)] = worker.fill(entry.context, [entry.tokens], 0)
        for ours, theirs in zip(kv_of(entry), (k, v), strict=True):
            assert (ours.cpu() - theirs.cpu()).abs().max() < 1e-3


def test_documents_filled_together_are_what_each_filled_alone_is(llm, monkeypatch):
    worker = get_kv_transfer_group().loader
    filled = fills_of(worker, monkeypatch)
    answer(llm, [prompt("You are helpful.", new_documents(4))])
    [(context, together)] = filled
    assert (context, len(together)) == (worker.cache.sink, 4)
    worker._scratch = [list(range(1, 40))]
    for key, tokens in together.items():
        entry = worker.cache.store._stack.tiers[0].get(key)
        [(k, v)] = worker.fill(context, [tokens], 0)
        for ours, theirs in zip(kv_of(entry), (k, v), strict=True):
            assert (ours.cpu() - theirs.cpu()).abs().max() < 1e-4


def test_a_group_that_fails_takes_no_other_along(llm):
    worker = get_kv_transfer_group().loader
    blocks = (tuple(range(1, 40)),)
    groups = [
        ChunkFill(worker.cache.sink, ((bytes([number]) * 16, (5, 6, 7)),), blocks if number != 1 else ((),))
        for number in range(3)
    ]
    worker.fill_in_background(groups)
    keys = [worker.cache.key_of_hash(group.chunks[0][0], 3, 0) for group in groups]
    assert [worker.cache.store.contains(key) for key in keys] == [True, False, True]


def fills_of(worker, monkeypatch):
    """Notes what the worker is told to fill, as it happens."""
    filled, fill = [], worker.cache.fill

    def noting(chunks, context, length):
        filled.append((context, chunks))
        return fill(chunks, context, length)

    monkeypatch.setattr(worker.cache, "fill", noting)
    return filled


def store_entry(store):
    def get(info):
        tier = store._stack.tiers[0]
        return tier.get(info.key)

    return get


def test_requests_of_one_token_do_not_keep_documents_waiting_for_ever(llm, monkeypatch):
    monkeypatch.setattr(backlog, "OVERDUE_SECONDS", 0.2)
    documents = new_documents(2)
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"report": True}})
    [first] = llm.generate([prompt("One token.", documents)], sampling, use_tqdm=False)
    assert first.kv_transfer_params["fallback_reason"] == "cost"
    time.sleep(0.3)
    llm.generate(["Some other question, which is"], sampling, use_tqdm=False)
    [again] = llm.generate([prompt("One token again.", documents)], sampling, use_tqdm=False)
    assert statuses(again) == ["cached"] * 2


def test_many_new_documents_at_once(llm):
    texts = [prompt(f"Number {number}.", new_documents(3)) for number in range(6)]
    expected = [plain(llm, [text])[0] for text in texts]
    for ours, theirs in zip(answer(llm, texts), expected, strict=True):
        same(ours, theirs)
    assert llm.llm_engine.reset_prefix_cache()  # no borrowed block was forgotten


def test_a_document_that_does_not_fit_behind_its_sink_prefix_is_not_filled(llm):
    """Its positions would be beyond the model's, where rotary tables end."""
    encode = llm.get_tokenizer().encode
    document = f"Report {random.random()}:"
    while len(encode(document)) < SMALL["max_model_len"] - 120:
        document += " and so on"
    before = llm.get_stats()["total_chunks"]
    [output] = answer(llm, [prompt("You are helpful.", [document])], report=True)
    assert output.kv_transfer_params == {"mode": "plain", "fallback_reason": "cost"}
    assert llm.get_stats()["total_chunks"] == before
    assert not llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler._backlog._waiting


def test_never(llm, monkeypatch):
    """The scheduler's own setting decides; nothing is stored."""
    from kvmosaic.core.config import load_config

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    monkeypatch.setattr(scheduler, "_config", load_config(enable_chunk_cache=True, miss_policy="never"))
    before = llm.get_stats()["total_chunks"]
    documents = new_documents(2)
    for number in range(2):
        [output] = answer(llm, [prompt(f"Never, number {number}.", documents)], report=True)
        assert output.kv_transfer_params["mode"] == "plain"
    assert llm.get_stats()["total_chunks"] == before


def test_predicted_times_come_from_measured_ones(llm):
    documents = new_documents(3)
    for _ in range(1 + ENOUGH):  # the first fills them
        answer(llm, [prompt(f"Warm {random.random()}.", documents)])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    lines = scheduler._costs[0]
    assert 0 < lines["blend"].seconds(100) < 60
    assert 0 < lines["remap"].seconds(100) < lines["blend"].seconds(100)


def test_a_request_that_has_to_ask_again_is_not_judged_again(llm, monkeypatch):
    """A step without room, or without blocks, sends it back: what was allowed once, as a trial, must not be spent."""
    documents = new_documents(3)
    for _ in range(1 + ENOUGH):
        answer(llm, [prompt(f"Warm {random.random()}.", documents)])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler
    judged, judge = [], scheduler._is_worth_it
    monkeypatch.setattr(scheduler._judge, "is_faster", lambda *_: judged.append(True) or len(judged) == 1)
    monkeypatch.setattr(scheduler, "_is_worth_it", lambda *given: judge(*given) and judge(*given))
    [output] = answer(llm, [prompt("Asked twice.", documents)], report=True)
    assert (output.kv_transfer_params["mode"], len(judged)) == ("reuse", 1)
    [refused] = answer(llm, [prompt("And another one.", new_documents(1) + documents)], report=True)
    assert refused.kv_transfer_params == {"mode": "plain", "fallback_reason": "cost"}
