"""Chunks that are not named: how the scheduler treats recurring text."""

import hashlib
import random

import pytest
from vllm.lora.request import LoRARequest

from kvmosaic.core.prompt import Span
from tests.engines.vllm.scheduler_side.fakes import MARKER, SINK, STEP, Side, digest_of, make_request

AUTO = {"chunk_sources": "auto"}


def words(length):
    return [random.randrange(10, 60_000) for _ in range(length)]


def ask(side, number, *parts, **arguments):
    tokens = [token for part in parts for token in part]
    return side.add(make_request(f"request {number}", tokens, report=True, **arguments))


def chunks(side, request):
    ours = side.scheduler._requests.get(request.request_id)
    return [] if ours is None else [list(ours.prompt.tokens_of(span)) for span in ours.prompt.chunks]


def test_from_the_third_prompt_on_documents_are_reused():
    side, documents = Side(**AUTO), [words(200), words(200)]
    orders = [(0, 1), (1, 0), (1, 0), (0, 1)]
    found = []
    for number, order in enumerate(orders):
        request = ask(side, number, words(20), *(documents[index] for index in order), words(40))
        found.append(chunks(side, request))
        for chunk in found[-1]:
            side.store(chunk)
        matched, _ = side.ask(request)
        if number < 2:
            assert found[-1] == [] or number == 1
        else:
            assert matched is not None
            assert matched > 380  # all text before the end of the second document
            assert sum(map(len, found[-1])) > 0.85 * 400
    assert len(found[1]) == 2


def test_a_run_is_missing_for_the_prompt_that_shows_it_and_filled_behind_it():
    side, document = Side(shape={"step_tokens": 8 * STEP}, **AUTO), words(200)
    first = ask(side, 1, words(20), document, words(10))
    assert side.ask(first) == (0, False)
    assert side.scheduler.finished(first) == {"mode": "plain", "fallback_reason": None}
    second = ask(side, 2, words(20), document, words(10))
    [run] = chunks(side, second)
    assert side.ask(second) == (0, False)
    filled = [digest for _ in range(3) for fill in side.run("request 2").fills for digest, _ in fill.chunks]
    assert filled == [digest_of(run)]


def test_prompts_in_which_nothing_comes_back_stay_vllms():
    side = Side(**AUTO)
    for number in range(5):
        request = ask(side, number, words(300))
        plain = list(request.block_hashes)
        assert side.ask(request) == (0, False)
        assert side.scheduler.finished(request) == {"mode": "plain", "fallback_reason": None}
        assert list(request.block_hashes) == plain
    assert side.counts("requests") == {"plain": 5}


def test_the_same_prompt_again_has_the_same_hashes():
    side, document = Side(**AUTO), words(200)
    prompts = [[*words(20), *document, *words(40)] for _ in range(3)]
    hashes = [list(ask(side, number, prompt).block_hashes) for number, prompt in enumerate(prompts)]
    again = [list(ask(side, 10 + number, prompt).block_hashes) for number, prompt in enumerate(prompts)]
    assert again == hashes
    longer = [list(ask(side, 20 + number, prompt, words(50)).block_hashes) for number, prompt in enumerate(prompts)]
    assert [each[: len(old)] for each, old in zip(longer, hashes, strict=True)] == hashes


def test_nothing_is_looked_for_unless_it_is_asked_for():
    side, document = Side(), words(200)
    for number in range(4):
        assert chunks(side, ask(side, number, words(20), document, words(10))) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"fields": {"lora_request": LoRARequest("adapter", 1, "/adapter")}},
        {"sampling": {"prompt_logprobs": 1}},
        {"chunk_cache": False},
    ],
    ids=["lora", "prompt-logprobs", "not-wanted"],
)
def test_requests_that_cannot_be_reused_neither_find_nor_show_anything(arguments):
    side, document = Side(**AUTO), words(200)
    for number in range(3):
        request = ask(side, number, words(20), document, words(10), **arguments)
        assert chunks(side, request) == []
        assert side.scheduler.finished(request)["fallback_reason"] is None
    assert chunks(side, ask(side, 10, words(20), document, words(10))) == []
    assert chunks(side, ask(side, 11, words(20), document, words(10)))


def test_where_a_request_says_where_its_chunks_are_nothing_else_is_one():
    side, documents = Side(**AUTO), [words(200), words(200)]
    for number in range(4):
        parts = (words(20), documents[0], [*documents[1], *words(10)])
        request = side.add(make_request(f"request {number}", *parts))
        assert chunks(side, request) == [documents[0]]


def test_salts_and_turns():
    side, document = Side(**AUTO), words(200)
    for number in range(4):
        request = ask(side, number, words(20), document, words(10), cache_salt=f"user {number}")
        assert chunks(side, request) == []
    for number in range(10, 13):
        request = ask(side, number, words(20), document, [MARKER], document[::-1], words(10))
    ours = side.ours(request)
    assert len(ours.prompt.chunks) == 2
    assert all(MARKER not in chunk for chunk in chunks(side, request))


def test_settings_can_ask_for_longer_runs():
    side, documents = Side(min_chunk_tokens=150, **AUTO), [words(200), words(120)]
    for number in range(3):
        request = ask(side, number, words(20), documents[0], words(9), documents[1], words(10))
    assert [len(chunk) > 150 for chunk in chunks(side, request)] == [True]
    assert side.ours(request).prompt.chunks[0].start < Span(0, 60).end


# --- runs that become one


class Pair:
    """Two stored documents that occurred side by side until they became one run."""

    def __init__(self, *, salt=None, system=None, **settings):
        self.side, self.salt, self.system = Side(**AUTO, **settings), salt, system
        self.documents, self.number = [words(230), words(230)], 0
        for order in ((0, 1), (1, 0), *[(0, 1)] * 9):
            request = self.ask(order)
            runs = self.side.scheduler._planner._discovery._runs._runs.values()
            if any(run.pieces for run in runs):
                break
            if chunks(self.side, request):
                self.side.report(dict.fromkeys(self.side.ours(request).digests, "host"))

    def ask(self, order=(0, 1), **arguments):
        self.number += 1
        apart = [MARKER] * 5  # enough to keep cuts in documents from depending on other text
        documents = (self.documents[index] for index in order)
        parts = (self.system or words(20), apart, *documents, apart, words(10))
        return ask(self.side, self.number, *parts, cache_salt=self.salt, **arguments)

    def waiting(self):
        """Chunks that wait to be filled."""
        backlog = self.side.scheduler._backlog
        return [*backlog._wanted._waiting.values(), *backlog._asked_once._waiting.values()]

    def fill(self):
        """The chunks that the workers fill while another request is running."""
        filled = []
        for _ in range(60):
            work = self.side.run()
            filled += [digest for fill in work.fills for digest, _ in fill.chunks]
            if work.fill_slice is not None and work.fill_slice.is_last:
                filled.append(work.fill_slice.digest)
        return filled


@pytest.mark.parametrize("policy", ["background", "fill-first"])
@pytest.mark.parametrize("salt", [None, "mine"])
def test_documents_that_become_one_are_loaded_one_by_one_until_the_whole_is_filled(policy, salt):
    pair = Pair(salt=salt, miss_policy=policy, shape={"step_tokens": 512})
    request = pair.ask()
    assert len(chunks(pair.side, request)) == 2
    [whole] = pair.waiting()
    name = digest_of(whole.tokens)
    if salt is not None:
        name = hashlib.sha256(salt.encode() + name).digest()[: len(name)]
    assert (whole.digest, whole.context) == (name, SINK)
    assert len(whole.tokens) > 350
    external, _ = pair.side.begin(request)
    assert external > 350
    [load] = pair.side.step().loads
    assert load.digests == pair.side.ours(request).digests
    assert [chunk["status"] for chunk in pair.side.ours(request).report["chunks"]] == ["cached", "cached"]
    assert pair.fill() == [whole.digest]
    pair.side.report({whole.digest: "host"})
    again = pair.ask()
    assert pair.side.ours(again).digests == (whole.digest,)
    assert pair.waiting() == []


def test_the_whole_is_computed_after_the_system_prompt_where_that_is_set():
    system = words(20)
    pair = Pair(system=system, chunk_context="system", shape={"prefix_cache_tokens": 0})
    request = pair.ask()
    ours = pair.side.ours(request)
    assert len(ours.digests) == 2
    [whole] = pair.waiting()
    begin = ours.prompt.chunks[0].start
    assert ours.context == tuple(request.prompt_token_ids[:begin])
    assert whole.context == tuple(request.prompt_token_ids[: len(whole.context)])
    assert len(whole.context) <= begin
    assert whole.digest == digest_of(whole.tokens, whole.context)
    pair.side.report({whole.digest: "host"})
    assert pair.side.ours(pair.ask()).digests == (whole.digest,)


def test_where_nothing_is_filled_the_pieces_stay_in_use():
    pair = Pair(miss_policy="never")
    assert len(chunks(pair.side, pair.ask())) == 2
    assert pair.waiting() == []


def test_a_whole_that_is_too_long_to_be_filled_stays_in_pieces():
    pair = Pair(shape={"max_positions": 300})
    assert len(chunks(pair.side, pair.ask())) == 2
    assert pair.waiting() == []


def test_a_whole_that_no_store_has_room_for_stays_in_pieces():
    pair = Pair()
    pair.fill()
    pair.side.report(max_stored_tokens=300)
    assert len(chunks(pair.side, pair.ask())) == 2
    assert pair.waiting() == []


@pytest.mark.parametrize(
    "arguments",
    [{"fields": {"lora_request": LoRARequest("adapter", 1, "/adapter")}}, {"sampling": {"prompt_logprobs": 1}}],
    ids=["lora", "prompt-logprobs"],
)
def test_requests_that_cannot_be_reused_have_nothing_filled(arguments):
    pair = Pair()
    pair.fill()
    pair.ask(**arguments)
    assert pair.waiting() == []
    pair.ask()
    assert len(pair.waiting()) == 1
