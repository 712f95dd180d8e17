"""Requests with LoRA adapters: their chunks, and when these are filled."""

import hashlib

import pytest
from vllm.lora.request import LoRARequest

from kvmosaic.engines.vllm.compat.scheduling import HIDDEN
from kvmosaic.engines.vllm.messages import Adapter
from kvmosaic.engines.vllm.scheduler_side import adapters as adapters_module
from kvmosaic.engines.vllm.scheduler_side import idle_fills
from kvmosaic.engines.vllm.scheduler_side.adapters import KnownAdapters
from tests.engines.vllm.scheduler_side.fakes import (
    FIRST,
    QUESTION,
    SECOND,
    STEP,
    SYSTEM,
    Side,
    ask_about,
    digest_of,
    make_request,
    text,
)

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
"""Digests of the weights of adapters."""


def lora(number=1, name=None, path="/adapter"):
    return LoRARequest(name or f"adapter {number}", number, path)


def adapted(*chunks, name="request", adapter=None, **params):
    return ask_about(*chunks, name=name, fields={"lora_request": adapter or lora()}, **params)


def key_of(tokens, weights, cache_salt=b""):
    return hashlib.sha256(b"\xff" + weights + cache_salt + digest_of(tokens)).digest()[:16]


def store(side, *chunks, weights=A):
    side.report({key_of(chunk, weights): "host" for chunk in chunks})


# --- chunks of adapters


def test_an_adapter_that_no_worker_has_loaded_is_served_plainly():
    side = Side()
    side.store(FIRST, SECOND)
    request = side.add(adapted(FIRST, SECOND))
    assert side.matched(request, 16) == 0
    assert side.counts("fallbacks") == {}, "it has not begun yet"
    side.give(request, 0, 16)
    assert side.counts("fallbacks") == {"lora": 1}
    side.give(request, 0, 16)  # after a preemption
    assert side.counts("fallbacks") == {"lora": 1}
    assert side.scheduler.finished(request) == {"mode": "plain", "fallback_reason": "lora"}
    assert side.is_forgotten(request)


def test_a_request_that_came_before_its_adapter_was_loaded_reuses_chunks():
    """Of many requests that are sent at once, the first one makes vLLM load the adapter."""
    side = Side()
    request = side.add(adapted(FIRST, SECOND))
    store(side, FIRST, SECOND)
    assert side.matched(request, 16) == 0
    side.report(adapters={1: A})
    assert side.matched(request, 16) is None, "vLLM found these tokens by hashes without salts"
    external, _ = side.begin(request, 16)
    assert external == 100 - 16
    [load] = side.step().loads
    assert load.adapter == Adapter(1, A)
    assert load.digests == (key_of(FIRST, A), key_of(SECOND, A))
    assert side.scheduler.finished(request)["mode"] == "reuse"
    assert side.counts("fallbacks") == {}
    assert side.is_forgotten(request)


def test_keys_depend_on_the_weights_and_not_on_the_name():
    side = Side(miss_policy="fill-first")
    side.report(adapters={1: A, 2: B, 3: A})

    def keys(name, **fields):
        return side.ours(side.add(make_request(name, SYSTEM, FIRST, QUESTION, **fields))).digests

    base = keys("base")
    first, second, third = (keys(str(n), fields={"lora_request": lora(n)}) for n in (1, 2, 3))
    assert base == (digest_of(FIRST),)
    assert first == third == (key_of(FIRST, A),)
    assert second == (key_of(FIRST, B),)
    salted = keys("salted", cache_salt="mine", fields={"lora_request": lora()})
    assert salted == (key_of(FIRST, A, b"mine"),)
    side.report(adapters={1: C})
    assert keys("reloaded", fields={"lora_request": lora()}) == (key_of(FIRST, C),)
    assert keys("untouched", fields={"lora_request": lora(2)}) == second


def test_no_salt_of_a_client_imitates_an_adapter():
    side = Side()
    for number, weights in enumerate((A, b"\xff" * 32, b"abc" + b"d" * 29)):
        for salt in ("\xff" + weights.decode("latin-1"), b"\xff".decode("utf8", "surrogateescape") + "x" * 32):
            request = side.add(make_request(f"{number} {salt}", SYSTEM, FIRST, QUESTION, cache_salt=salt))
            assert side.ours(request).digests != (key_of(FIRST, weights),)


def test_ranks_have_to_agree():
    side = Side(shape={"ranks": 2})
    for rank, weights, is_known in ((0, A, False), (1, B, False), (1, A, True), (0, B, False), (1, B, True)):
        side.report(rank=rank, adapters={1: weights})
        request = adapted(FIRST, name=f"{rank} {weights}")
        assert (side.scheduler._adapters.of(request) == Adapter(1, weights)) is is_known


def test_the_end_of_a_system_prompt_is_not_shared():
    side = Side(miss_policy="fill-first")
    side.report(adapters={1: A})
    for request in (adapted(FIRST, name="adapted"), ask_about(FIRST, name="base")):
        side.begin(side.add(request))
        [load] = side.step().loads
        assert load.is_findable is (request.lora_request is None)


def test_only_so_many_adapters_are_remembered(monkeypatch):
    monkeypatch.setattr(adapters_module, "MAX_KNOWN", 3)
    known = KnownAdapters(1)
    for number in range(1, 6):
        known.update(0, {number: A})
        known.add(adapted(FIRST, name=str(number), adapter=lora(number)))
    assert [known.of(adapted(FIRST, adapter=lora(n))) is not None for n in range(1, 6)] == [False, False] + [True] * 3
    assert len(known._names) == 3
    for number in range(1, 6):
        known.finished(str(number))
    assert not known._of


# --- vLLM's prefix cache


def hashes(side, name, adapter=None):
    fields = {"lora_request": adapter} if adapter else {}
    return side.add(make_request(name, text(5, 100), fields=fields)).block_hashes


def test_blocks_of_replaced_weights_are_not_found():
    """vLLM knows an adapter by name and path. Hashes never come back: requests that run during a change leave KV of
    both weights."""
    side, other = Side(), Side()
    seen = [*hashes(side, "0", lora())]
    assert seen == [*hashes(other, "0", lora())]
    for count, weights in enumerate((A, B, A, B, B, C)):
        side.report(adapters={1: weights})
        found = hashes(side, str(count), lora())
        assert found == hashes(side, f"{count} again", lora())
        assert not any(each.endswith(HIDDEN) for each in found), "routers may know blocks of exact KV"
        if count in (0, 4):  # the first ones, which were loaded for the first request; and loaded again as they were
            assert found == seen[-len(found) :]
        else:
            assert not {*found} & {*seen}
            seen += found
    assert hashes(side, "base") == hashes(other, "base")
    assert hashes(side, "other", lora(2)) == hashes(other, "other", lora(2))


def test_a_name_that_gets_another_number():
    """This happens when an adapter is unloaded and loaded again."""
    side = Side()
    side.report(adapters={1: A, 2: A, 3: B})
    first, second, third = (hashes(side, str(n), lora(n, "name")) for n in (1, 2, 3))
    assert first == second
    assert not {*first} & {*third}
    unknown = hashes(side, "4", lora(4, "name"))
    assert unknown == third, "before workers tell, nothing older is found"


# --- loads


def test_an_adapter_is_never_loaded_in_slices():
    side = Side(miss_policy="fill-first")
    side.report(adapters={1: A})
    long = [text(10 + number, 40) for number in range(6)]
    side.store(*long)
    store(side, *long)
    side.run()
    base = side.add(ask_about(*long, name="base", recompute_ratio=0.2))
    assert side.ask(base, 16) == (20 + 240 - 16, True)
    request = side.add(adapted(*long, name="adapted", recompute_ratio=0.2))
    assert side.scheduler._admission.is_long(side.ours(request), 16)
    assert side.ask(request, 16) == (20 + 240 - 16, False)
    side.begin(request, 16)
    [load] = side.step().loads
    assert not load.is_sliced


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_takes_longer_than_a_step_is_prefilled_and_filled_meanwhile(is_alone):
    """Also if no other request runs: one may arrive."""
    side = Side(miss_policy="fill-first")
    side.report(adapters={1: A})
    many = [text(10 + number, 20) for number in range(5)]  # more than a step has room for
    if not is_alone:
        side.run()
    request = side.add(adapted(*many))
    assert side.matched(request, 16) == 0
    assert side.counts("fallbacks") == {"slower": 1}
    assert not side.run().fills
    fills = [fill for _ in range(9) for fill in side.run("request").fills]
    assert {fill.adapter for fill in fills} == {Adapter(1, A)}
    assert {digest for fill in fills for digest, _ in fill.chunks} == {key_of(chunk, A) for chunk in many}


def test_a_request_whose_chunks_are_filled_first_does_not_wait_for_that():
    """Its adapter may not be active meanwhile."""
    side = Side(miss_policy="fill-first")
    side.report(adapters={1: A})
    side.run()
    request = side.add(adapted(FIRST))
    assert STEP // 2 < len(FIRST) + 3 < STEP
    assert side.ask(request, 16) == (60 - 16, False)
    side.begin(request, 16)
    [load] = side.step().loads
    assert load.fill
    assert not len(side.scheduler._backlog)


# --- filling in the background


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(idle_fills.time, "monotonic", lambda: Clock.now)
    return Clock


def lacking(side, *chunks, name="lacks", adapter=None):
    """A request that is served plainly, because none of its chunks is stored."""
    request = side.add(adapted(*chunks, name=name, adapter=adapter))
    assert side.matched(request) == 0
    side.give(request, 0)
    return request


def test_chunks_are_filled_while_their_adapter_is_active():
    side = Side()
    side.report(adapters={1: A, 2: B})
    side.add(make_request("base", text(5, 100)))
    lacking(side, FIRST[:12], name="one")
    lacking(side, FIRST[:12], name="two", adapter=lora(2))
    side.matched(side.add(ask_about(FIRST[:12], name="lacks")))
    [fill] = side.run("base").fills
    assert (fill.adapter, fill.chunks[0][0]) == (None, digest_of(FIRST[:12]))
    assert not side.run("base").fills
    [fill] = side.run("two").fills
    assert (fill.adapter, fill.chunks[0][0]) == (Adapter(2, B), key_of(FIRST[:12], B))
    [fill] = side.step(scheduled={"base": 1, "one": 1, "two": 1}).fills
    assert (fill.adapter, fill.chunks[0][0]) == (Adapter(1, A), key_of(FIRST[:12], A))


def test_chunks_of_different_adapters_are_filled_apart():
    side = Side(shape={"step_tokens": 400})
    side.report(adapters={1: A, 2: B})
    for number in (1, 2):
        lacking(side, FIRST[:12], SECOND[:12], name=str(number), adapter=lora(number))
    fills = side.step(scheduled={"1": 1, "2": 1}).fills
    assert [(fill.adapter.id, len(fill.chunks)) for fill in fills] == [(1, 2), (2, 2)]
    assert not {*fills[0].blocks[0]} & {*fills[1].blocks[0]}


def test_a_long_chunk_goes_back_when_its_adapter_is_not_active():
    side = Side(blocks=60)
    side.report(adapters={1: A})
    lacking(side, text(7, 200), name="one")
    free = side.pool.get_num_free_blocks()
    part = side.run("one").fill_slice
    assert (part.adapter, part.start) == (Adapter(1, A), 0)
    assert side.run("one").fill_slice.start > 0
    assert side.pool.get_num_free_blocks() < free
    assert side.run("other").fill_slice is None
    assert side.pool.get_num_free_blocks() == free
    assert side.run("one").fill_slice.start == 0


def test_chunks_of_replaced_weights_are_not_filled(clock):
    side = Side()
    side.report(adapters={1: A})
    lacking(side, FIRST[:12], name="one")
    side.report(adapters={1: B})
    assert not side.run("one").fills
    clock.now += idle_fills.IDLE_SECONDS + 1
    assert not side.run("one").fills
    assert side.counts("dropped_fills") == {"": 1}


def test_idle_chunks_are_dropped_and_counted(clock):
    side = Side()
    side.report(adapters={1: A, 2: B})
    side.matched(side.add(adapted(FIRST[:12], SECOND[:12], name="one")))
    clock.now += 40
    side.matched(side.add(adapted(FIRST[:12], name="two", adapter=lora(2))))
    side.run("other")
    assert len(side.scheduler._backlog) == 3
    clock.now += 30
    side.run("other")
    assert len(side.scheduler._backlog) == 1
    assert side.counts("dropped_fills") == {"": 2}
    assert not side.run("one").fills
    assert len(side.run("two").fills) == 1
    assert not len(side.scheduler._backlog)


def test_what_waits_for_adapters_is_limited(monkeypatch, clock):
    monkeypatch.setattr(idle_fills, "MAX_WAITING_TOKENS", 2048)
    side = Side()
    side.report(adapters={1: A, 2: B})
    for number in range(3):
        clock.now += 1
        side.matched(side.add(adapted(text(10 + number, 12), name=f"1 {number}")))
        side.matched(side.add(adapted(text(10 + number, 12), name=f"2 {number}", adapter=lora(2))))
    assert len(side.scheduler._backlog) == 4
    side.run("other")
    assert side.counts("dropped_fills") == {"": 2}
    side.scheduler.empty_memory()
    assert not len(side.scheduler._backlog)
    assert side.scheduler._backlog._idle._weight == 0
