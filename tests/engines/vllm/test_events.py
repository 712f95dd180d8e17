"""Stored-block events as a router receives them, compared with vLLM's own for the same prompts."""

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

from kvmosaic.engines.vllm.scheduler_side.prefix_events import MEDIUM
from tests.engines.vllm.helpers import PART, SMALL, ask, draw, start, store
from tests.engines.vllm.tiny import WINDOW
from tests.store.remote_servers import free_port

pytestmark = pytest.mark.engine

BLOCK, TAIL = SMALL["block_size"], 64


class Router:
    """An engine, and the events that it publishes."""

    def __init__(self, model: str, **settings) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.bind(address)  # the engine connects
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": address}
        fixed = {"prefix_blocks": True, "skip_tokenizer_init": True}
        self.llm = start(model, kv_events_config=events, **fixed | settings)
        while not self._socket.poll(300):  # it takes a moment until the two are connected
            ask(self.llm, draw(BLOCK + 1))
        self.ask(draw(5))

    def ask(self, *prompts, **params):
        """Answer prompts and store their segments with the next step. Returns all events until then."""
        last = draw(BLOCK + 1)  # vLLM's event for its only block comes last
        for each in (prompts, [draw(5)], [last]):
            ask(self.llm, *each, **params if each is prompts else {})
        events = []
        while True:
            assert self._socket.poll(30_000)
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                if isinstance(event, BlockStored) and event.token_ids == last[:BLOCK]:
                    return events
                events.append(event)

    def forget(self):
        assert self.llm.reset_prefix_cache()

    def empty(self):
        """Also empty the store."""
        assert self.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        return self.ask(draw(5))


def ours(events, kind=BlockStored, group=0):
    return [each for each in events if isinstance(each, kind) and each.medium == MEDIUM and each.group_idx == group]


def theirs(events):
    """vLLM's events about its own cache."""
    return [each for each in events if isinstance(each, BlockStored) and each.medium != MEDIUM]


def blocks(events):
    """Blocks of stored events: hash → the hash before it, and its tokens."""
    found = {}
    for event in events:
        before = event.parent_block_hash
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.extra_keys == [None] * len(event.block_hashes)
        for index, name in enumerate(event.block_hashes):
            found[name] = before, tuple(event.token_ids[index * event.block_size :][: event.block_size])
            before = name
    return found


def names(events):
    return [name for event in events for name in event.block_hashes]


@pytest.fixture(scope="module")
def router(tiny_llama):
    return Router(tiny_llama, host_memory="8MB", chunk_cache_gpu_memory_fraction=0.0, miss_policy="fill-first")


def test_events_are_those_of_vllm_for_what_is_stored(router):
    prompt = draw(2 * PART + 40)
    events = router.ask(prompt)
    first, second = ours(events)
    assert [first.token_ids, second.token_ids] == [prompt[:PART], prompt[PART : 2 * PART]]
    assert [first.parent_block_hash, second.parent_block_hash] == [None, first.block_hashes[-1]]
    assert [first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window] == ["full_attention", None]
    assert blocks([first, second]).items() <= blocks(theirs(events)).items()
    assert not ours(events, group=1)
    longer = prompt + draw(PART)
    [third] = ours(router.ask(longer))  # and earlier events are not repeated
    assert third.token_ids == longer[2 * PART : 3 * PART]
    assert third.parent_block_hash == second.block_hashes[-1]


def test_answers_are_announced_as_they_are_stored(router):
    prompt = draw(PART - 20)
    events = router.ask(prompt, max_tokens=60)
    [event] = ours(events)
    assert event.token_ids[: len(prompt)] == prompt
    assert blocks([event]).items() <= blocks(theirs(events)).items()


def test_approximate_blocks_are_not_announced(router):
    prompt = draw(3 * PART)
    spans = [(0, 20), (20, PART + 20), (PART + 20, 2 * PART + 70), (2 * PART + 70, len(prompt))]
    for _ in range(3):
        events = router.ask(prompt, boundaries=spans, recompute_ratio=0.1, max_tokens=2 * BLOCK)
        assert not ours(events)
        assert [token for event in theirs(events) for token in event.token_ids] == []  # vLLM does not, either
        assert not [event for event in events if isinstance(event, BlockRemoved)]
    assert not ours(router.ask(prompt, salt="kept apart"))


def test_of_a_prompt_with_chunks_vllm_announces_what_stands_before_them(router):
    prompt = draw(3 * PART)
    spans = [(0, BLOCK + 20), (BLOCK + 20, 2 * PART), (2 * PART, len(prompt))]
    [event] = theirs(router.ask(prompt, boundaries=spans))
    assert (event.token_ids, event.parent_block_hash, event.extra_keys) == (prompt[:BLOCK], None, [None])
    assert len(event.block_hashes) == 1
    exact = theirs(router.ask(prompt, boundaries=spans, recompute_ratio=1.0))
    assert [token for event in exact for token in event.token_ids] == prompt[BLOCK:]


def test_what_the_store_drops_is_taken_back(router):
    router.empty()
    there, dropped = set(), 0
    for _ in range(8):
        events = router.ask(draw(2 * PART + 1))
        added, gone = names(ours(events)), names(ours(events, BlockRemoved))
        assert len(added) == 2 * PART // BLOCK
        assert there.isdisjoint(added)
        assert there.issuperset(gone)
        there, dropped = there.union(added).difference(gone), dropped + len(gone)
        held = store().get_stats()["total_chunks"]
        assert len(there) == held * PART // BLOCK
    assert dropped > 0
    assert set(names(ours(router.empty(), BlockRemoved))) == there


def test_what_another_engine_stored_is_announced_when_it_is_found(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # without it, some releases of vLLM name blocks at random
    prompt = draw(2 * PART + 1)
    first = Router(tiny_llama, disk_path=str(tmp_path))
    said = ours(first.ask(prompt))
    second = Router(tiny_llama, disk_path=str(tmp_path))
    assert ours(second.ask(prompt)) == said


def test_windowed_layers_claim_only_the_tail(tiny_gemma):
    router = Router(tiny_gemma)
    prompt = draw(2 * PART + 40)
    events = router.ask(prompt)
    known = blocks(theirs(events))
    whole, tails = ours(events), ours(events, group=1)
    assert [event.token_ids for event in whole] == [prompt[:PART], prompt[PART : 2 * PART]]
    assert [event.token_ids for event in tails] == [prompt[PART - TAIL : PART], prompt[2 * PART - TAIL : 2 * PART]]
    assert blocks(whole).items() <= known.items()
    assert blocks(tails).items() <= known.items()
    assert {(each.kv_cache_spec_kind, each.kv_cache_spec_sliding_window) for each in tails} == {
        ("sliding_window", WINDOW)
    }
    # Blocks that were loaded without the beginnings of windows have other hashes in vLLM, but not in our events.
    router.forget()
    longer = prompt + draw(PART)
    events = router.ask(longer)
    [third] = ours(events)
    assert third.token_ids == longer[2 * PART : 3 * PART]
    assert third.parent_block_hash == whole[1].block_hashes[-1]
    assert set(third.block_hashes) <= set(names(theirs(events)))
    tails += ours(events, group=1)
    gone = router.empty()
    assert set(names(ours(gone, BlockRemoved))) == set(names([*whole, third]))
    assert set(names(ours(gone, BlockRemoved, 1))) == set(names(tails))
    again = router.ask(longer)
    assert set(names(whole)).isdisjoint(names(theirs(again)))
    assert (ours(again), ours(again, group=1)) == ([*whole, third], tails)
