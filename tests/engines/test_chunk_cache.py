"""The cache of an engine: which chunks are stored at all."""

import torch

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV, KVFormat, PackedKV
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.key import EXACT
from kvmosaic.engines.chunk_cache import ChunkCache


def open_cache(folder, fingerprint=lambda length: "name", **settings):
    return ChunkCache(
        load_config(enable_chunk_cache=True, disk_path=folder, **settings),
        "model",
        sink=(),
        fingerprint=fingerprint,
        share=HeadShare.of_rank(0, 1, 2, 3),
        max_positions=None,
        kv_format=KVFormat(3, 2, 8, 8, torch.float32),
    )


def test_nothing_is_stored_while_entries_have_no_names(tmp_path):
    fingerprint: str | None = None
    cache = open_cache(tmp_path, lambda length: fingerprint)
    k = v = torch.zeros(2, 3, 5, 8)
    for is_named in (False, True):
        fingerprint = "name" if is_named else None
        key = cache.key(range(5), ())
        cache.put(ChunkKV.from_packed(key, range(5), (), PackedKV.of(k, v, cache.document_format)))
        assert cache.store.contains(key) == is_named
        assert (cache.store.lasting([key]) == {key}) == is_named
    cache.close()


def test_exact_copies_of_documents_are_no_documents_in_8_bits(tmp_path):
    """An engine with ``entry_dtype=auto`` stored one in the same folder."""
    k = v = torch.zeros(2, 3, 5, 8)
    cache = open_cache(tmp_path)
    exact = cache.key(range(5), ())
    cache.put(ChunkKV.from_packed(exact, range(5), (), PackedKV.of(k, v, cache.document_format)))
    assert cache.take_changes() == cache.present() == {exact.content_hash: "host"}
    cache.close()
    cache = open_cache(tmp_path, entry_dtype="int8")
    assert cache.take_changes() == cache.present() == {exact.content_hash + EXACT: "disk"}
    key = cache.key(range(5), ())
    assert (key.content_hash, key == exact) == (exact.content_hash, False)
    cache.put(ChunkKV.from_packed(key, range(5), (), PackedKV.of(k, v, cache.document_format)))
    cache.store.clear()
    assert cache.take_changes() == {key.content_hash: None, key.content_hash + EXACT: None}
    cache.close()
