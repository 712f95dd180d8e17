"""Memory that is reused, and values that are received into their final memory."""

import gc

import numpy as np
import torch
from store_helpers import make_entry, same

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.memory import SMALLEST, MemoryPool
from kvmosaic.store.remote.base import Bytes
from kvmosaic.store.remote.heads import join, values_of
from kvmosaic.store.remote.incoming import IncomingEntry
from kvmosaic.store.seal import ANY_ENTRY, Seal


def address(array: Bytes) -> int:
    return int(array.ctypes.data)


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    pool = MemoryPool()
    array = pool.take(SMALLEST)
    array[:] = 7
    first = address(array)
    tensor = torch.from_numpy(array[1:].view(np.int8))
    del array
    gc.collect()
    other = pool.take(SMALLEST)
    assert address(other) != first
    other[:] = 8
    assert bool((tensor == 7).all())
    del tensor
    gc.collect()
    assert address(pool.take(SMALLEST)) == first


def test_only_memory_of_about_the_size_is_used_again() -> None:
    pool = MemoryPool()
    array = pool.take(4 * SMALLEST)
    first = address(array)
    del array
    gc.collect()
    assert address(pool.take(2 * SMALLEST)) != first
    again = pool.take(4 * SMALLEST - 100)
    assert address(again) == first
    assert again.nbytes == 4 * SMALLEST - 100


def test_no_more_is_kept_than_allowed() -> None:
    pool = MemoryPool(kept_bytes=2 * SMALLEST)
    arrays = [pool.take(SMALLEST) for _ in range(5)]
    del arrays
    gc.collect()
    assert sum(len(memory) for memory in pool._kept.values()) == 2 * SMALLEST


def by_head(entry: ChunkKV) -> ChunkKV:
    heads = HeadShare.of_rank(0, 1, entry.format.heads, entry.format.layers).heads
    key = ChunkKey(entry.key.content_hash, entry.key.num_tokens, "m", "f", heads=str(heads))
    return ChunkKV(key, entry.tokens, entry.context, entry.format, entry.data)


def receive(entry: ChunkKV, like: ChunkKV | None) -> tuple[ChunkKV, IncomingEntry]:
    """Receive an entry after entries of the same format."""
    seen = None
    if like is not None:
        decoded = receive(like, None)[1].parts[0]
        assert not isinstance(decoded, Exception)
        seen = decoded.format
    incoming = IncomingEntry(entry.key, ANY_ENTRY, seen)
    for index, make in enumerate(values_of(entry, Seal())):
        value = np.frombuffer(b"".join(make()), np.uint8)
        at = 0
        for buffer in incoming.buffers_for(index, value.nbytes):
            buffer[:] = value[at : at + buffer.nbytes]
            at += buffer.nbytes
        assert at == value.nbytes
        incoming.received(index)
    parts = [part for part in incoming.parts.values() if not isinstance(part, Exception)]
    return join(entry.key, parts, incoming.block), incoming


def test_heads_are_read_into_their_places_once_the_format_is_known() -> None:
    entry, earlier = (by_head(make_entry(number, heads=4, tokens=tokens)) for number, tokens in ((1, 9), (2, 6)))
    found, incoming = receive(entry, like=earlier)
    assert same(found, entry)
    assert incoming.block is not None
    assert found.data.data_ptr() == address(incoming.block)
    assert found.data.untyped_storage().nbytes() == found.nbytes  # so that the host tier keeps it as it is


def test_a_format_that_was_guessed_wrong_does_no_harm() -> None:
    entry = by_head(make_entry(1, heads=4))
    for k_dim, dtype in ((2, torch.bfloat16), (4, torch.bfloat16), (300, torch.bfloat16), (3, torch.uint8)):
        found, _ = receive(entry, like=by_head(make_entry(2, heads=4, k_dim=k_dim, dtype=dtype)))
        assert same(found, entry)
