"""Treatment of chunks that vLLM's workers have not stored: no first answer is worse or slower because of them."""

import random
import time
from collections import Counter

import pytest
from vllm import SamplingParams

from kvmosaic.engines.vllm.messages import ChunkFill
from kvmosaic.engines.vllm.telemetry.cost import ENOUGH
from tests.engines.vllm.helpers import (
    DOCUMENTS,
    SMALL,
    add_cost,
    answer,
    ask,
    fill_alone,
    fill_in_background,
    judge_once,
    measure_nothing,
    note_fills,
    plain,
    prompt,
    same,
    set_miss_policy,
    set_overdue,
    start,
    statuses,
    store,
    stored_entry,
    waiting_fills,
    worker_side,
)
from tests.entries import kv_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tiny_text):
    """An engine with the default settings of users."""
    engine = start(tiny_text)
    assert engine.chunk_cache_config.miss_policy == "background"
    return engine


@pytest.fixture
def llm(engine, monkeypatch):
    """An engine that learns no costs of reuse."""
    measure_nothing(monkeypatch)
    return engine


def why_plain(output):
    told = output.kv_transfer_params
    assert told["mode"] == "plain"
    return told["fallback_reason"]


def new_documents(count):
    return [f"Report {random.random()}: {random.choice(DOCUMENTS)}" for _ in range(count)]


def test_new_documents_are_prefilled_exactly_and_filled_while_the_answer_is_decoded(llm):
    documents = new_documents(3)
    text = prompt("You are helpful.", documents)
    before = llm.get_stats()
    [first] = answer(llm, [text], report=True)
    after = llm.get_stats()
    assert (after["cache_hits"], after["cache_misses"]) == (before["cache_hits"], before["cache_misses"] + 3)
    assert why_plain(first) == "not-stored"
    assert statuses(first) == ["prefilled"] * 3
    [exact] = plain(llm, [text])
    same(first, exact)
    assert llm.get_stats()["total_chunks"] - before["total_chunks"] >= 3
    [second] = answer(llm, [prompt("Another system prompt.", documents[::-1])], report=True)
    assert second.kv_transfer_params["mode"] == "reuse"
    assert statuses(second) == ["cached"] * 3
    assert llm.get_stats()["cache_hits"] == before["cache_hits"] + 3


def test_a_prompt_that_was_blended_is_not_finished_as_plain(llm, monkeypatch):
    """vLLM's prefix cache has most of the prompt. Computing the rest as usual would be faster, but the result would
    match neither a blend nor a plain prefill."""
    documents = new_documents(3)
    answer(llm, [prompt("You are helpful.", documents)])
    partly = 0
    for number in range(6):  # the length decides whether a part of the last document is still to be computed
        text = prompt(f"Blended {random.random()}" + " again" * 5 * number, documents[::-1], "It is")
        [first] = answer(llm, [text], report=True, recompute_ratio=0.3, policy="random")
        assert first.kv_transfer_params["mode"] == "reuse"
        with monkeypatch.context() as patch:
            add_cost(patch, llm, 10**6)
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


@pytest.mark.parametrize(("policy", "times"), [("composite(asking=1)", 1), ("kv-deviation(part=v, layers=2)", 2)])
def test_a_new_document_is_computed_once_if_the_choice_leaves_its_kv(llm, monkeypatch, policy, times):
    """It is computed before the choice. Other text behind the first chosen token is computed again, because it is
    short."""
    tokenizer = llm.get_tokenizer()

    def cut(*parts):
        """Token ids, and the span of each part."""
        ids, spans = list[int](), list[tuple[int, int]]()
        for part in parts:
            tokens = tokenizer.encode(part, add_special_tokens=False)
            spans.append((len(ids), len(ids) + len(tokens)))
            ids += tokens
        return ids, spans

    known, [new] = new_documents(3), new_documents(1)
    ids, spans = cut("You are helpful.", *known, "It is")
    ask(llm, ids, max_tokens=10, boundaries=spans)
    ids, spans = cut("Another one. " * 5, known[0], "Between documents.", known[1], new, known[2], "It is")
    text = spans.pop(2)
    paged, computed = worker_side().paged, Counter[int]()
    compute = paged.compute

    def counting(runs, ranges, *more):
        computed.update(place for run in runs for place in range(run.start, run.end))
        return compute(runs, ranges, *more)

    with monkeypatch.context() as patch:
        patch.setattr(paged, "compute", counting)
        [output] = ask(llm, ids, max_tokens=2, boundaries=spans, recompute_ratio=0.4, policy=policy, report=True)
    assert statuses(output) == ["cached", "cached", "prefilled", "cached"]
    if times == 1:  # the other policy computed everything behind the first chunk's beginning before it chose
        assert output.kv_transfer_params["recomputed"][0][0] < text[0]
    assert {computed[place] for place in range(*text)} == {2}
    assert {computed[place] for place in range(*spans[3])} == {times}


def test_what_is_filled_in_the_background_is_what_filling_first_stores(llm):
    documents = new_documents(3)
    answer(llm, [prompt("You are helpful.", documents)])
    entries = [entry for info in store().scan() if (entry := stored_entry(info.key)) is not None]
    sink = worker_side().cache.sink
    mine = [entry for entry in entries if entry.context == sink and len(entry.tokens) > 5][-3:]
    assert len(mine) == 3
    for entry in mine:
        for ours, theirs in zip(kv_of(entry), fill_alone(entry.context, entry.tokens), strict=True):
            assert (ours.cpu() - theirs.cpu()).abs().max() < 1e-3


def test_documents_filled_together_are_what_each_filled_alone_is(llm, monkeypatch):
    filled = note_fills(monkeypatch)
    answer(llm, [prompt("You are helpful.", new_documents(4))])
    [(context, together)] = filled
    assert (context, len(together)) == (worker_side().cache.sink, 4)
    for key, tokens in together.items():
        for ours, theirs in zip(kv_of(stored_entry(key)), fill_alone(context, tokens), strict=True):
            assert (ours.cpu() - theirs.cpu()).abs().max() < 1e-4


def test_a_group_that_fails_takes_no_other_along(llm):
    cache = worker_side().cache
    blocks = (tuple(range(1, 40)),)
    groups = [
        ChunkFill(
            context=cache.sink,
            chunks=((bytes([number]) * 16, (5, 6, 7)),),
            blocks=blocks if number != 1 else ((),),
        )
        for number in range(3)
    ]
    fill_in_background(groups)
    keys = [cache.key_of_hash(group.chunks[0][0], 3, 0) for group in groups]
    assert [store().contains(key) for key in keys] == [True, False, True]


def test_requests_of_one_token_do_not_keep_documents_waiting_for_ever(llm, monkeypatch):
    set_overdue(monkeypatch, 0.2)
    documents = new_documents(2)
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"report": True}})
    for system in ("One token.", "Another token."):  # once is not enough: chunks may never be asked for again
        [output] = llm.generate([prompt(system, documents)], sampling, use_tqdm=False)
        assert why_plain(output) == "not-stored"
        time.sleep(0.3)
    llm.generate(["Some other question, which is"], sampling, use_tqdm=False)
    [again] = llm.generate([prompt("One token again.", documents)], sampling, use_tqdm=False)
    assert statuses(again) == ["cached"] * 2


def test_many_new_documents_at_once(llm):
    texts = [prompt(f"Number {number}.", new_documents(3)) for number in range(6)]
    expected = [plain(llm, [text])[0] for text in texts]
    for ours, theirs in zip(answer(llm, texts), expected, strict=True):
        same(ours, theirs)
    assert llm.llm_engine.reset_prefix_cache()  # all borrowed blocks were returned


def test_a_document_that_does_not_fit_behind_its_sink_prefix_is_not_filled(llm):
    """Its positions would be beyond the model's, where its rotary tables end."""
    encode = llm.get_tokenizer().encode
    document = f"Report {random.random()}:"
    document += " and so on" * ((SMALL["max_model_len"] - 120 - len(encode(document))) // len(encode(" and so on")))
    assert SMALL["max_model_len"] - 130 < len(encode(document)) <= SMALL["max_model_len"] - 120
    before = llm.get_stats()["total_chunks"]
    [output] = answer(llm, [prompt("You are helpful.", [document])], report=True)
    assert why_plain(output) == "not-stored"
    assert llm.get_stats()["total_chunks"] == before
    assert waiting_fills(llm) == 0


def test_never(llm, monkeypatch):
    """The scheduler's own setting decides, and nothing is stored."""
    set_miss_policy(monkeypatch, llm, "never")
    before = llm.get_stats()["total_chunks"]
    documents = new_documents(2)
    for number in range(2):
        [output] = answer(llm, [prompt(f"Never, number {number}.", documents)], report=True)
        assert output.kv_transfer_params["mode"] == "plain"
    assert llm.get_stats()["total_chunks"] == before


def test_a_request_that_has_to_ask_again_is_not_judged_again(engine, monkeypatch):
    """If a step has no room or no blocks, the request has to ask again. A trial that was allowed must not be lost by
    that."""
    documents = new_documents(3)
    for _ in range(1 + ENOUGH):
        answer(engine, [prompt(f"Warm {random.random()}.", documents)])
    judged = judge_once(monkeypatch, engine)
    [output] = answer(engine, [prompt("Asked twice.", documents)], report=True)
    assert (output.kv_transfer_params["mode"], len(judged)) == ("reuse", 1)
    [refused] = answer(engine, [prompt("And another one.", new_documents(1) + documents)], report=True)
    assert why_plain(refused) == "slower"


def test_another_question_in_the_same_order_is_answered_from_the_prefix_cache(llm):
    """After a first visit the answer is exact, and as fast as plain vLLM's; another order is served by reuse."""
    documents = new_documents(4)
    texts = [prompt("You are helpful.", documents, f"Question {random.random()}: it is") for _ in range(3)]
    answer(llm, texts[:1])
    while waiting_fills(llm):
        plain(llm, ["Something else."])
    outputs = answer(llm, texts[1:], report=True)
    for output in outputs:
        assert why_plain(output) == "prefix-cached"
        ahead = output.kv_transfer_params["chunks"][-1]["span"]["end"]
        assert output.num_cached_tokens >= ahead // SMALL["block_size"] * SMALL["block_size"]
    [other] = answer(llm, [prompt("You are helpful.", documents[::-1])], report=True)
    assert statuses(other) == ["cached"] * len(documents)
    llm.reset_prefix_cache()
    for ours, theirs in zip(outputs, plain(llm, texts[1:]), strict=True):
        same(ours, theirs)
