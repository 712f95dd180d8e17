"""The cache of an engine: what is stored at all."""

import torch

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import KVFormat, PackedKV
from kvmosaic.core.heads import HeadShare
from kvmosaic.engines.chunk_cache import ChunkCache


def test_nothing_is_stored_while_entries_have_no_names(tmp_path):
    fingerprint: str | None = None
    cache = ChunkCache(
        load_config(enable_chunk_cache=True, disk_path=tmp_path),
        "model",
        sink=(),
        fingerprint=lambda length: fingerprint,
        share=HeadShare.of_rank(0, 1, 2, 3),
        max_positions=None,
        kv_format=KVFormat(3, 2, 8, 8, torch.float32),
    )
    k = v = torch.zeros(2, 3, 5, 8)
    for is_named in (False, True):
        fingerprint = "name" if is_named else None
        key = cache.key(range(5), ())
        cache.put(key, range(5), (), PackedKV.of(k, v, cache.document_format))
        assert cache.store.contains(key) == is_named
        assert (cache.store.lasting([key]) == {key}) == is_named
    cache.close()
