"""Stored-block events as a router gets them, beside vLLM's own for the same prompts."""

import random
from collections import Counter

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from tests.engines.vllm.conftest import SMALL
from tests.engines.vllm.test_prefix_blocks import ask
from tests.engines.vllm.tiny import write_tiny_gemma, write_tiny_llama
from tests.store.remote_servers import free_port

BLOCK, PART, WINDOW, TAIL = 32, 256, 60, 64
OURS = "KVMOSAIC"


class Router:
    """An engine and what it publishes."""

    def __init__(self, model: str, **settings) -> None:
        from kvmosaic.vllm import LLM

        address = f"tcp://127.0.0.1:{free_port()}"
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe("")
        self._socket.bind(address)  # the engine connects
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": address}
        fixed = {"prefix_blocks": True, "skip_tokenizer_init": True, "prefix_caching_hash_algo": "sha256"}
        self.llm = LLM(model, enable_chunk_cache=True, kv_events_config=events, **SMALL | fixed | settings)
        while not self._socket.poll(300):  # it takes a moment until the two are connected
            ask(self.llm, draw(BLOCK + 1))
        self.take()

    def ask(self, *prompts, **params):
        """Have prompts answered, and stored what is due with the next step; all events."""
        ask(self.llm, *prompts, **params)
        ask(self.llm, draw(5))
        return self.take()

    def take(self):
        events = []
        while self._socket.poll(300):
            _, _, payload = self._socket.recv_multipart()
            events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
        return events

    def forget(self):
        assert self.llm.reset_prefix_cache()

    def held(self) -> int:
        """Entries in the store."""
        return get_kv_transfer_group().loader.cache.store.get_stats()["total_chunks"]


def draw(count):
    return [random.randrange(10, 500) for _ in range(count)]


def stored(events, medium, group=0):
    return [each for each in events if isinstance(each, BlockStored) and (each.medium, each.group_idx) == (medium, group)]


def blocks(events):
    """Of stored events, block by block: hash → the hash before it, and its tokens."""
    found = {}
    for event in events:
        before = event.parent_block_hash
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        assert event.extra_keys == [None] * len(event.block_hashes)
        for index, name in enumerate(event.block_hashes):
            found[name] = before, event.token_ids[index * event.block_size :][: event.block_size]
            before = name
    return found


def names(events):
    return [name for event in events for name in event.block_hashes]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def router(model):
    return Router(model, host_memory="4MB", miss_policy="background")


def test_events_are_those_of_vllm_for_what_is_stored(router):
    prompt = draw(2 * PART + 40)
    events = router.ask(prompt)
    ours, theirs = stored(events, OURS), blocks(stored(events, "GPU" if stored(events, "GPU") else "CPU"))
    assert [event.token_ids for event in ours] == [prompt[:PART], prompt[PART : 2 * PART]]
    assert [event.parent_block_hash for event in ours] == [None, ours[0].block_hashes[-1]]
    assert {event.kv_cache_spec_kind for event in ours} == {"full_attention"}
    assert blocks(ours).items() <= theirs.items()
    longer = prompt + draw(PART)  # neither says again what it said
    more = router.ask(longer)
    assert [event.token_ids for event in stored(more, OURS)] == [longer[2 * PART : 3 * PART]]
    assert stored(more, OURS)[0].parent_block_hash == ours[1].block_hashes[-1]


def test_answers_are_announced_as_they_are_stored(router):
    prompt = draw(PART - 20)
    events = router.ask(prompt, max_tokens=60)
    [event] = stored(events, OURS)
    assert event.token_ids[: len(prompt)] == prompt
    assert set(event.block_hashes) <= set(names(stored(events, "GPU") or stored(events, "CPU")))


def test_approximate_blocks_are_not_announced(router):
    prompt = draw(3 * PART)
    spans = [(0, 20), (20, PART + 20), (PART + 20, 2 * PART + 70), (2 * PART + 70, len(prompt))]
    for _ in range(3):
        events = router.ask(prompt, boundaries=spans, recompute_ratio=0.1)
        assert not stored(events, OURS)
    assert not stored(router.ask(prompt, salt="kept apart"), OURS)


def test_what_the_store_drops_is_taken_back(router):
    events = [event for _ in range(4) for event in router.ask(draw(2 * PART + 1))]
    assert router.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    router.ask(draw(5))
    for _ in range(4):
        events = router.ask(draw(2 * PART + 1)) + router.ask(draw(2 * PART + 1))
        count = Counter(names(stored(events, OURS)))
        assert set(count.values()) == {1}
    gone = [each for each in events if isinstance(each, BlockRemoved) and each.medium == OURS]
    assert gone, "more than fits was stored"
