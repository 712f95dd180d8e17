"""Clients of an engine: hostile ones, innocent ones beside them, and users that are separated by salts."""

import math
import random

import pytest

from tests.engines.vllm.helpers import (
    answer,
    ask,
    block_pool,
    draw,
    fill_alone,
    forget,
    greedy,
    is_idle,
    join,
    measure_nothing,
    note_fills,
    prompt,
    report,
    scheduler_side,
    start,
    statuses,
    store,
    stored_entry,
    waiting_fills,
    worker_side,
)
from tests.entries import kv_of

pytestmark = pytest.mark.engine

STEP, REQUESTS = 128, 8
"""Maximum number of tokens and of requests in a step of vLLM."""
LONG = "word " * 30


@pytest.fixture(scope="module")
def engine(tiny_text):
    """An engine with the default parameters that clients may send."""
    room = {"max_num_batched_tokens": STEP, "max_num_seqs": REQUESTS}
    return start(tiny_text, client_parameters="chunk_cache,recompute_ratio,policy,boundaries", **room)


@pytest.fixture
def llm(engine, monkeypatch):
    """An engine that learns no costs of reuse."""
    measure_nothing(monkeypatch)
    return engine


def documents(count=3):
    return [f"Report {random.random()}: {LONG}" for _ in range(count)]


def cached(output):
    """Number of cached tokens in the answer's usage."""
    return output.num_cached_tokens or 0


def add(llm, name, ids, count=4, extra=None, **params):
    sampling = greedy(count, detokenize=False, params=params)
    if extra is not None:
        sampling.extra_args = extra
    llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling)


def finish(llm, *names):
    """Step until requests are done. Returns the tokens of each answer."""
    answers = {}
    for _ in range(3000):
        answers |= {
            each.request_id: list(each.outputs[0].token_ids) for each in llm.llm_engine.step() if each.finished
        }
        if answers.keys() >= set(names):
            return [answers[name] for name in names]
    raise AssertionError(f"{names} never end")


# --- input of clients


@pytest.mark.parametrize(
    "sent",
    [
        {"policy": " " * 10**6},
        {"boundaries": [[0, 1]] * 10**6},
        {"recompute_ratio": math.nan},
        {"boundaries": [[0, 2**63]]},
    ],
    ids=lambda sent: next(iter(sent)),
)
def test_whatever_comes_as_parameters_is_answered_as_plain_vllm_does(llm, sent):
    ids = llm.get_tokenizer().encode(prompt("Be brief.", documents()))
    add(llm, "odd", ids, extra={"kv_transfer_params": sent})
    add(llm, "plain", ids, chunk_cache=False)
    odd, ordinary = finish(llm, "odd", "plain")
    assert odd == ordinary
    assert is_idle(llm)


def test_a_report_that_is_not_allowed_is_not_given(llm):
    text = prompt("Be brief.", documents())
    for _ in range(2):
        [output] = answer(llm, [text], report=True)
        assert output.kv_transfer_params is None


# --- other clients


def test_one_request_with_hundreds_of_chunks_does_not_keep_anothers_waiting(llm, monkeypatch):
    """The other request's documents are filled within a few tokens of its answer, and no step fills more than half a
    step."""
    filled = note_fills(monkeypatch)
    parts = [draw(10), *[draw(20) for _ in range(80)], draw(5)]
    ids, boundaries = join(parts)
    add(llm, "hostile", ids, 400, boundaries=boundaries)
    while waiting_fills(llm) == 0:
        llm.llm_engine.step()
    mine = [draw(20) for _ in range(2)]
    ids, boundaries = join([draw(10), *mine, draw(5)])
    add(llm, "innocent", ids, 60, boundaries=boundaries)
    finish(llm, "innocent")
    assert waiting_fills(llm) > 40
    stored = {entry.tokens for info in store().scan() if (entry := stored_entry(info.key)) is not None}
    assert {tuple(chunk) for chunk in mine} <= stored
    size = worker_side()._filler._shape
    for context, chunks in filled:
        once, each = size.fill_shares(len(context))
        assert once + sum(each + len(tokens) for tokens in chunks.values()) <= STEP
    llm.llm_engine.abort_request(["hostile"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    scheduler_side(llm).empty_memory()
    ask(llm, draw(5))


def check_slices(llm, length):
    """Compare a chunk that is filled while another request decodes with the same chunk filled in one go."""
    chunk = draw(length)
    ids, boundaries = join([draw(10), chunk, draw(5)])
    free = block_pool(llm).get_num_free_blocks()
    add(llm, "asks", ids, 1, boundaries=boundaries)
    add(llm, "goes on", draw(20), 60)
    finish(llm, "asks", "goes on")
    ask(llm, draw(5))
    assert block_pool(llm).get_num_free_blocks() == free
    found = [entry for info in store().scan() if (entry := stored_entry(info.key)) and entry.tokens == tuple(chunk)]
    [entry] = found
    assert entry.context == worker_side().cache.sink
    for ours, theirs in zip(kv_of(entry), fill_alone(entry.context, entry.tokens), strict=True):
        assert (ours.cpu() - theirs.cpu()).abs().max() < 1e-3
    forget(llm)
    ids, boundaries = join([draw(30), chunk, draw(5)])
    [again] = ask(llm, ids, boundaries=boundaries, recompute_ratio=0.0)
    assert cached(again) == length


def test_a_long_chunk_is_filled_in_slices_to_what_it_is_in_one_go(llm):
    check_slices(llm, 700)


def test_what_is_computed_of_a_chunk_under_other_weights_is_not_stored(llm, monkeypatch):
    """Weights change before the last slice. The scheduler learns of it too late to begin the chunk again."""
    side, chunk, parts = worker_side(), draw(650), []
    weight = side.weights._model.get_parameter("model.embed_tokens.weight")
    fill_slice = side._filler._fill_slice

    def change():
        weight.data.neg_()
        side.weights.may_have_changed()

    def change_before_last(part):
        parts.append(part)
        done = fill_slice(part)
        left = len(side.cache.sink) + len(chunk) - part.start - len(part.tokens)
        if 0 < left <= len(part.tokens):
            change()
        return done

    monkeypatch.setattr(side._filler, "_fill_slice", change_before_last)
    ids, boundaries = join([draw(10), chunk, draw(5)])
    add(llm, "asks", ids, 1, boundaries=boundaries)
    add(llm, "goes on", draw(20), 60)
    finish(llm, "asks", "goes on")
    assert side.weights.changes == 1
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    change()
    ask(llm, draw(5))
    assert not [info for info in store().scan() if info.key.num_tokens == len(chunk)]


# --- users with salts


def test_users_with_salts_of_their_own_learn_nothing_of_each_other(llm):
    """They learn nothing from cached tokens, from reports, or from hits in the store."""
    mine = documents()
    ids = llm.get_tokenizer().encode(prompt("You are helpful, and you say so.", mine))

    def asked(salt):
        before = llm.get_stats()["cache_hits"]
        [output] = ask(llm, ids, salt=salt, max_tokens=60)
        return cached(output), llm.get_stats()["cache_hits"] - before

    assert asked("alice") == (0, 0)
    forget(llm)
    assert asked("alice")[0] > 100
    for salt in ("bob", None):
        assert asked(salt) == (0, 0)
    assert asked("bob")[0] > 100


@pytest.mark.parametrize("salts", [("alice", "bob"), ("alice", None), (None, "alice")])
def test_chunks_the_system_prompts_end_and_prefixes_are_apart_also_behind_the_prefix_cache(llm, salts):
    mine = documents(2)
    tokenizer = llm.get_tokenizer()

    def tokens_cached(salt, system):
        forget(llm)
        [output] = ask(llm, tokenizer.encode(prompt(system, mine)), salt=salt, max_tokens=60)
        return cached(output)

    first, second = salts
    assert tokens_cached(first, "One system prompt.") == 0
    assert tokens_cached(first, "Another system prompt.") > 50
    assert tokens_cached(second, "Another system prompt.") == 0


def test_with_everything_allowed_reports_say_nothing_of_others_either(tiny_text, monkeypatch):
    measure_nothing(monkeypatch)
    llm = start(tiny_text, prefix_blocks=True, max_num_batched_tokens=STEP, max_num_seqs=REQUESTS)
    mine = documents()
    ids = llm.get_tokenizer().encode(prompt("You are helpful.", mine))
    for salt in ("alice", "bob", None):
        forget(llm)
        [first] = ask(llm, ids, salt=salt, max_tokens=60, report=True)
        assert (report(first)["mode"], report(first)["fallback_reason"]) == ("plain", "not-stored")
        for _ in range(5):  # how many steps filling takes depends on the blocks
            forget(llm)
            [second] = ask(llm, ids, salt=salt, max_tokens=60, report=True)
            if statuses(second) == ["cached"] * 3:
                break
        assert statuses(second) == ["cached"] * 3
    check_slices(llm, 700)  # here blocks can be read back
