"""Salted blocks, and only these, are left out of vLLM's own events."""

import random

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvmosaic.engines.vllm.compat.scheduling import HIDDEN, hide_events

SIZE = 4


class Pool:
    def __init__(self, events):
        self._events = events

    def take_events(self):
        return self._events


def taken(*events):
    pool = Pool(list(events))
    hide_events(pool)
    return pool.take_events()


def names(rng, count, *, as_int):
    """Hashes of blocks, some of them salted."""
    made = [rng.randbytes(28) + (HIDDEN if rng.random() < 0.4 else b"\0" + rng.randbytes(3)) for _ in range(count)]
    return [int.from_bytes(each[-8:], "big") for each in made] if as_int else made


def is_hidden(name):
    return (name.to_bytes(8, "big") if isinstance(name, int) else name).endswith(HIDDEN)


@pytest.mark.parametrize("as_int", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_is_each_plain_block_with_its_tokens_and_parent(seed, as_int):
    rng = random.Random(seed)
    hashes = names(rng, rng.randrange(1, 9), as_int=as_int)
    [before] = names(rng, 1, as_int=as_int)
    tokens = list(range(SIZE * len(hashes)))
    extra = [(index,) for index in range(len(hashes))]
    stored = BlockStored(hashes, before, tokens, SIZE, None, "GPU", None, extra)
    found = {}
    for event in taken(stored):
        assert isinstance(event, BlockStored)
        assert len(event.token_ids) == SIZE * len(event.block_hashes)
        assert event.medium == "GPU"
        parent = event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            found[name] = parent, event.token_ids[SIZE * index : SIZE * (index + 1)], event.extra_keys[index]
            parent = name
    expected = {
        name: (hashes[index - 1] if index else before, tokens[SIZE * index : SIZE * (index + 1)], extra[index])
        for index, name in enumerate(hashes)
        if not is_hidden(name)
    }
    assert found == expected
    gone = [name for event in taken(BlockRemoved(hashes, "GPU")) for name in event.block_hashes]
    assert gone == [name for name in hashes if not is_hidden(name)]


def test_other_events_stay():
    assert [type(event) for event in taken(AllBlocksCleared())] == [AllBlocksCleared]
