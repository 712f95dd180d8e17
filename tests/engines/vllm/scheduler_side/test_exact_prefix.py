"""Prompts with chunks of which vLLM's own prefix cache has exact KV, under vLLM's own scheduler."""

import pytest
from vllm.v1.request import RequestStatus

from kvmosaic.core.key import content_hash
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.messages import Adapter
from tests.engines.vllm.scheduler_side.fakes import BLOCK, SYSTEM, Side, ask_about, make_request, text
from tests.engines.vllm.scheduler_side.simulation import Simulation

DOCUMENTS = [text(number, length) for number, length in enumerate((40, 25, 90), start=1)]
AHEAD = len(SYSTEM) + sum(map(len, DOCUMENTS))
"""Tokens before the question."""
WHOLE = AHEAD // BLOCK * BLOCK
"""Tokens before the question that whole blocks hold."""
BLENDS = [(0.0, "composite"), (0.3, "composite"), (0.3, "sink-link")]


def ask(name, question, documents=DOCUMENTS, blend=BLENDS[1], system=SYSTEM, **more):
    told = {"report": True, "recompute_ratio": blend[0], "policy": blend[1], "sampling": {"max_tokens": 4}, **more}
    return make_request(name, system, *documents, text(question, 10), **told)


def store(engine, *documents):
    for document in documents:
        engine.workers.put(content_hash(document, engine.ours._planner._sink), "host")
    engine.step()


def answered(engine, *requests):
    """The reports to requests that are answered, with the number of tokens that vLLM's own prefix cache had."""
    counted = [request.prefill_stats for request in requests]  # vLLM takes it away at the end
    for request in requests:
        engine.add(request)
    engine.finish()
    engine.check_that_nothing_is_left()
    reports = [engine.reports.get(request.request_id, {}) for request in requests]
    return [
        {**report, "local": stats.num_local_cached_tokens} for report, stats in zip(reports, counted, strict=True)
    ]


@pytest.mark.parametrize("blend", BLENDS)
def test_another_question_about_documents_in_the_same_order_finds_what_the_first_one_computed(blend):
    engine = Simulation(blocks=200)
    [first] = answered(engine, ask("first", 91, blend=blend))
    assert (first["mode"], first["fallback_reason"]) == ("plain", "not-stored")
    store(engine, *DOCUMENTS)
    [second] = answered(engine, ask("second", 92, blend=blend))
    assert (second["mode"], second["fallback_reason"]) == ("plain", "prefix-cached")
    assert second["local"] == WHOLE
    assert [chunk["tier"] for chunk in second["chunks"][:-1]] == ["prefix-cache"] * 2
    [third] = answered(engine, ask("third", 92, DOCUMENTS[::-1], blend=blend))
    assert third["mode"] == "reuse"


def test_what_reuse_blended_is_never_taken_for_exact():
    """All documents are stored when the first question comes, so it is answered by reuse."""
    engine = Simulation(blocks=200)
    store(engine, *DOCUMENTS)
    first, second = answered(engine, ask("first", 91), ask("second", 92))
    assert first["mode"] == second["mode"] == "reuse"


def test_the_same_question_again_finds_its_whole_prompt():
    engine = Simulation(blocks=200)
    answered(engine, ask("first", 91))
    store(engine, *DOCUMENTS)
    [report] = answered(engine, ask("second", 91))
    assert (report["fallback_reason"], report["local"] >= WHOLE) == ("prefix-cached", True)


@pytest.mark.parametrize("blend", BLENDS)
def test_a_system_prompt_alone_does_not_suffice_even_if_it_is_longer_than_the_documents(blend):
    engine = Simulation(blocks=200)
    store(engine, *DOCUMENTS)
    system = [*SYSTEM, *text(80, 2 * AHEAD)]
    answered(engine, make_request("plain", system, sampling={"max_tokens": 4}, report=True))
    [report] = answered(engine, ask("first", 91, blend=blend, system=system))
    assert report["mode"] == "reuse"
    assert report["local"] == len(system) // BLOCK * BLOCK


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_that_come_together_compute_new_documents_once(is_async):
    """As those of plain vLLM do."""
    engine = Simulation(blocks=200, is_async=is_async)
    reports = answered(engine, *(ask(str(number), 91 + number) for number in range(3)))
    assert [report["mode"] for report in reports] == ["plain"] * 3
    assert [report["local"] for report in reports] == [0, WHOLE, WHOLE]
    for report in reports[1:]:
        assert [chunk["tier"] for chunk in report["chunks"][:-1]] == ["prefix-cache"] * 2


@pytest.mark.parametrize("blend", BLENDS)
def test_documents_that_vllm_evicts_while_a_request_waits_are_reused(blend):
    engine = Simulation(blocks=24)
    answered(engine, ask("first", 91, blend=blend))
    store(engine, *DOCUMENTS)
    ahead = make_request("ahead", text(70, 330), sampling={"max_tokens": 4}, report=True)
    _, report = answered(engine, ahead, ask("second", 92, blend=blend))
    assert report["mode"] == "reuse"


@pytest.mark.parametrize("blend", BLENDS)
def test_documents_that_vllm_evicts_while_it_has_no_blocks_for_a_request_are_reused(blend):
    engine = Simulation(blocks=24)
    answered(engine, ask("first", 91, blend=blend))
    store(engine, *DOCUMENTS)
    engine.add(make_request("busy", text(70, 196), sampling={"max_tokens": 170}, report=True))
    for _ in range(5):
        engine.step()
    request = engine.add(ask("second", 92, blend=blend))
    engine.step()
    assert engine.ours._requests["second"].plain_because is Fallback.PREFIX_CACHED
    assert request.status is RequestStatus.WAITING
    engine.finish()
    engine.check_that_nothing_is_left()
    assert engine.reports["second"]["mode"] == "reuse"


def test_a_conversation_that_was_served_by_reuse_keeps_its_history():
    """Even if another client has the same documents computed, without saying that they are documents."""
    engine = Simulation(blocks=400)
    store(engine, *DOCUMENTS)
    history = text(60, 300)

    def turn(name, *more):
        told = {"recompute_ratio": 0.3, "policy": "sink-link", "sampling": {"max_tokens": 4}, "report": True}
        return make_request(name, SYSTEM, *DOCUMENTS, [*history, *more], **told)

    answered(engine, turn("first"))
    flat = [*SYSTEM, *(token for document in DOCUMENTS for token in document), *text(93, 10)]
    answered(engine, make_request("plain", flat, sampling={"max_tokens": 4}, report=True))
    [report] = answered(engine, turn("second", 5, 6))
    assert report["local"] >= AHEAD + len(history) - BLOCK


def test_new_chunks_behind_an_exact_prefix_are_filled_in_the_background():
    engine = Simulation(blocks=200)
    answered(engine, ask("first", 91))
    store(engine, *DOCUMENTS)
    new = text(5, 24)
    [report] = answered(engine, ask("second", 92, [*DOCUMENTS, new], sampling={"max_tokens": 30}))
    assert report["fallback_reason"] == "prefix-cached"
    assert report["chunks"][-1]["reason"] == "missing"
    [report] = answered(engine, ask("third", 92, [new, *DOCUMENTS]))
    assert report["chunks"][0]["status"] == "cached"


def test_exact_prefixes_beside_a_draft_model_may_lack_a_block():
    """With some draft models, vLLM finds a block less than it has."""
    found = []
    for has_drafts in (False, True):
        side = Side(shape={"has_drafts": has_drafts}, recompute_ratio=0.0)
        side.store(*DOCUMENTS)
        ours = side.ours(side.add(ask_about(*DOCUMENTS)))
        plain = ours.block_salts.plain
        side.scheduler._pool.has_cached = plain.__contains__
        found.append(side.scheduler._exact.enough(ours, []))
    assert found == [WHOLE, WHOLE - BLOCK]


def test_a_request_that_is_left_to_the_prefix_cache_counts_once_it_has_blocks():
    side = Side(recompute_ratio=0.0)
    side.store(*DOCUMENTS)
    side.scheduler._pool.has_cached = lambda block_hash: True
    request = side.add(ask_about(*DOCUMENTS))
    for _ in range(2):
        assert side.matched(request, WHOLE) == 0
        assert not side.counts("requests")
    for _ in range(2):  # again after a preemption
        side.give(request, 0, WHOLE)
        assert (side.counts("requests"), side.counts("fallbacks")) == ({"plain": 1}, {"prefix-cached": 1})
    assert side.scheduler.finished(request)["fallback_reason"] == "prefix-cached"
    assert side.is_forgotten(request)


def test_blocks_of_an_adapter_are_never_taken_for_exact():
    """vLLM may replace an adapter's weights under the same name."""
    side = Side(recompute_ratio=0.0)
    request = side.add(ask_about(*DOCUMENTS))
    ours = side.ours(request)
    exact, plain = side.scheduler._exact, ours.block_salts.plain
    side.store(*DOCUMENTS)
    side.scheduler._pool.has_cached = lambda block_hash: True
    assert exact.enough(ours, plain) > 0
    assert exact.enough(ours, []) > 0
    ours.adapter = Adapter(1, b"digest")
    assert exact.enough(ours, plain) == 0
    side.scheduler._serve_plainly(request, ours, 0, Fallback.SLOWER)
    assert request.block_hashes != plain


def test_a_request_of_another_user_finds_nothing():
    engine = Simulation(blocks=200)
    answered(engine, ask("first", 91))
    [report] = answered(engine, ask("other", 92, cache_salt="other"))
    assert report["local"] == 0
