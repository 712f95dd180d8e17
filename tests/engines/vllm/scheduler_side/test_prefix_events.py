"""Exact prefix segments are announced while all ranks have them, and withdrawn when one rank has lost them."""

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvmosaic.engines.vllm.compat.scheduling import event_hash
from kvmosaic.engines.vllm.messages import RankReport
from kvmosaic.engines.vllm.scheduler_side import prefix_events
from kvmosaic.engines.vllm.scheduler_side.prefix_events import MEDIUM, EventGroup, PrefixEvents
from kvmosaic.engines.vllm.scheduler_side.store_mirror import StoreMirror
from tests.engines.vllm.scheduler_side.fakes import (
    BLOCK,
    FIRST,
    SEGMENT,
    Side,
    ask_about,
    make_request,
    make_shape,
    text,
)
from tests.engines.vllm.scheduler_side.prefixes import prefix_digests

FULL = EventGroup("full_attention", None, None)
WINDOW = EventGroup("sliding_window", 30, 32)
PER_SEGMENT = SEGMENT // BLOCK
PROMPT = text(5, 3 * SEGMENT + 10)
DIGESTS = prefix_digests(PROMPT)


def test_a_segment_is_announced_while_all_ranks_have_it():
    mirror, tokens, hashes = StoreMirror(2), text(1, 4 * BLOCK), [bytes([index]) * 32 for index in range(4)]
    events = PrefixEvents(mirror.has, make_shape(segment_tokens=2 * BLOCK), [FULL])

    def report(rank, **changes):
        changed = {name.encode(): tier for name, tier in changes.items()}
        mirror.update(RankReport(rank=rank, fastest="host", changes=changed, fetched={}, costs={}, is_off=False))
        events.update(changed)
        return [(type(event), list(map(hashes.index, map(as_bytes, event.block_hashes)))) for event in events.take()]

    def as_bytes(name):
        return next(each for each in hashes if event_hash(each) == name)

    events.expect(b"one", 0, tokens, hashes)
    events.expect(b"two", 2 * BLOCK, tokens, hashes)
    assert report(0, two="host", one="disk") == []
    assert report(1, other="host") == []
    assert report(1, two="host", one="host") == [(BlockStored, [0, 1]), (BlockStored, [2, 3])]
    assert report(0, two="disk") == []
    assert report(1, two=None) == [(BlockRemoved, [2, 3])]
    events.clear()
    assert report(0) == [(BlockRemoved, [0, 1])]


def announcing(*groups, **shape):
    side = Side(prefix_blocks=True, shape=shape)
    side.scheduler.prefixes.announce(groups or [FULL])
    return side


def computed(side, name="plain", tokens=PROMPT):
    """A plain request that has computed its prompt, which the workers were told to save."""
    request = side.add(make_request(name, tokens))
    side.begin(request, more=10)
    side.run(name, 1, len(tokens))
    return request


def stored(events, group=0):
    return [event for event in events if isinstance(event, BlockStored) and event.group_idx == group]


def names(hashes):
    return [event_hash(each) for each in hashes]


def test_saved_segments_are_announced_when_the_ranks_have_stored_them():
    side = announcing()
    hashes = names(computed(side).block_hashes)
    assert side.scheduler.prefixes.take_events() == []
    side.report({DIGESTS[1]: "host", DIGESTS[0]: "host"})
    first, second = side.scheduler.prefixes.take_events()
    assert first.block_hashes == hashes[:PER_SEGMENT]
    assert second.block_hashes == hashes[PER_SEGMENT : 2 * PER_SEGMENT]
    assert (first.parent_block_hash, second.parent_block_hash) == (None, hashes[PER_SEGMENT - 1])
    assert (first.token_ids, second.token_ids) == (PROMPT[:SEGMENT], PROMPT[SEGMENT : 2 * SEGMENT])
    assert (first.medium, first.block_size, first.lora_id) == (MEDIUM, BLOCK, None)
    assert (first.kv_cache_spec_kind, first.kv_cache_spec_sliding_window) == ("full_attention", None)
    assert first.extra_keys == [None] * PER_SEGMENT
    assert side.scheduler.prefixes.take_events() == []


def test_nothing_is_announced_twice():
    side = announcing()
    computed(side)
    side.report(dict.fromkeys(DIGESTS, "host"))
    assert len(side.scheduler.prefixes.take_events()) == 3
    for tier in ("disk", "host"):
        side.report(dict.fromkeys(DIGESTS, tier))
    computed(side, "again")
    assert side.scheduler.prefixes.take_events() == []


def test_what_is_loaded_from_another_engines_store_is_announced_then():
    side = announcing()
    side.report(dict.fromkeys(DIGESTS[:2], "disk"))
    assert side.scheduler.prefixes.take_events() == []
    request = side.add(make_request("plain", PROMPT))
    assert side.matched(request) is None
    side.report(fetched=["plain"])
    side.begin(request, more=10)
    assert [event.token_ids for event in side.scheduler.prefixes.take_events()] == [
        PROMPT[:SEGMENT],
        PROMPT[SEGMENT : 2 * SEGMENT],
    ]


def test_an_emptied_store_takes_everything_back():
    side = announcing()
    computed(side)
    side.report(dict.fromkeys(DIGESTS[:2], "host"))
    said = [name for event in side.scheduler.prefixes.take_events() for name in event.block_hashes]
    side.scheduler.empty_memory()
    events = side.scheduler.prefixes.take_events()
    assert all(isinstance(event, BlockRemoved) and event.medium == MEDIUM for event in events)
    assert [name for event in events for name in event.block_hashes] == said
    side.report({DIGESTS[2]: "host"})  # which no request waits for any more
    assert side.scheduler.prefixes.take_events() == []


def test_without_events_nobody_is_told():
    side = Side(prefix_blocks=True)
    computed(side)
    side.report(dict.fromkeys(DIGESTS, "host"))
    assert side.scheduler.prefixes.take_events() == []


def test_chunks_are_never_announced():
    """Not even if the store has the same tokens as an exact prefix."""
    side = announcing()
    request = side.add(ask_about(FIRST, text(6, 200)))
    side.store(FIRST, text(6, 200))
    side.begin(request)
    side.run("request", 1, 280)
    side.report(dict.fromkeys(prefix_digests(list(request.all_token_ids)), "host"))
    side.scheduler.finished(request)
    assert side.scheduler.prefixes.take_events() == []


def test_layers_with_a_window_announce_the_end_of_each_segment():
    side = announcing(FULL, WINDOW, window_tail=32)
    hashes = names(computed(side).block_hashes)
    side.report({DIGESTS[0]: "host", DIGESTS[1]: "host"})
    events = side.scheduler.prefixes.take_events()
    assert [event.block_hashes for event in stored(events)] == [hashes[:4], hashes[4:8]]
    tails = stored(events, 1)
    assert [event.block_hashes for event in tails] == [hashes[2:4], hashes[6:8]]
    assert [event.parent_block_hash for event in tails] == [hashes[1], hashes[5]]
    assert [event.token_ids for event in tails] == [PROMPT[32:64], PROMPT[96:128]]
    assert {(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in tails} == {
        ("sliding_window", 30)
    }
    side.report({DIGESTS[1]: None})
    gone = side.scheduler.prefixes.take_events()
    assert [(event.group_idx, event.block_hashes) for event in gone] == [(0, hashes[4:8]), (1, hashes[6:8])]


def test_a_window_that_keeps_all_of_a_segment_is_no_group_of_its_own():
    side = announcing(FULL, EventGroup("sliding_window", 60, SEGMENT))
    computed(side)
    side.report({DIGESTS[0]: "host"})
    assert [event.group_idx for event in side.scheduler.prefixes.take_events()] == [0]


def test_segments_whose_blocks_have_hashes_of_their_own_are_announced_with_vllms():
    side = announcing(window_tail=32)
    hashes = names(computed(side).block_hashes)
    side.report(dict.fromkeys(DIGESTS[:2], "host"))
    said = [event.block_hashes for event in side.scheduler.prefixes.take_events()]
    side.report(dict.fromkeys(DIGESTS[:2]))
    side.report(dict.fromkeys(DIGESTS[:2], "host"))
    side.scheduler.prefixes.take_events()
    request = side.add(make_request("again", PROMPT))
    side.begin(request, more=10)
    assert names(request.block_hashes[: 2 * PER_SEGMENT]) != hashes[: 2 * PER_SEGMENT]
    assert [event.block_hashes for event in side.scheduler.prefixes.take_events()] == said


def test_hashes_finer_than_blocks_are_put_together():
    mirror, tokens = StoreMirror(1), text(1, SEGMENT)
    hashes = [bytes([index]) * 32 for index in range(SEGMENT // 8)]
    events = PrefixEvents(mirror.has, make_shape(hash_block_size=8), [FULL])
    events.expect(b"one", 0, tokens, hashes)
    changes = {b"one": "host"}
    mirror.update(RankReport(rank=0, fastest="host", changes=changes, fetched={}, costs={}, is_off=False))
    events.update(changes)
    [event] = events.take()
    assert len(event.block_hashes) == SEGMENT // BLOCK


def test_a_segment_whose_last_block_is_not_hashed_yet_is_not_awaited():
    mirror, tokens = StoreMirror(1), text(1, SEGMENT)
    events = PrefixEvents(mirror.has, make_shape(), [FULL])
    events.expect(b"one", 0, tokens, [bytes([index]) * 32 for index in range(PER_SEGMENT - 1)])
    changes = {b"one": "host"}
    mirror.update(RankReport(rank=0, fastest="host", changes=changes, fetched={}, costs={}, is_off=False))
    events.update(changes)
    assert events.take() == []


@pytest.mark.parametrize("limit", [1, 2])
def test_too_many_awaited_segments_and_the_oldest_are_forgotten(monkeypatch, limit):
    monkeypatch.setattr(prefix_events, "MAX_EXPECTED", limit)
    side = announcing()
    computed(side)
    side.report(dict.fromkeys(DIGESTS, "host"))
    assert [event.token_ids for event in side.scheduler.prefixes.take_events()] == [
        PROMPT[start : start + SEGMENT] for start in (0, SEGMENT, 2 * SEGMENT)
    ][3 - limit :]
