"""What a request is brought from the store, without an engine."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.engines.vllm.messages import ChunkLoad
from kvmosaic.engines.vllm.telemetry.metrics import ChunkStats
from kvmosaic.engines.vllm.telemetry.timing import StageTimer
from kvmosaic.engines.vllm.worker_side.bringer import Bringer
from kvmosaic.engines.vllm.worker_side.fetcher import ChunkFetcher
from kvmosaic.engines.vllm.worker_side.images import LoadImages
from kvmosaic.store import ChunkStorageManager
from kvmosaic.store.tiers.host import HostTier
from tests.store.store_helpers import CONTEXT, make_entry

STORED = make_entry(1)
OTHER = tuple(range(5, 9))
"""Tokens of a document that has the same hash, which somebody made on purpose."""


class Filler:
    """Computes entries of zeros."""

    def fill(self, chunks, context, blocks, adapter, images):
        empty = torch.zeros_like(STORED.data)
        return {key: replace(STORED, key=key, tokens=tokens, data=empty) for key, tokens in chunks.items()}


@pytest.fixture
def store():
    opened = ChunkStorageManager([HostTier(2**30)])
    opened.put(STORED)
    yield opened
    opened.close()


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("is_stored_first", [False, True])
def test_documents_of_one_hash_never_share_kv(store, fill, is_stored_first):
    fetcher = ChunkFetcher(store)
    cache = SimpleNamespace(
        store=store,
        context_of=lambda prompt: CONTEXT,
        key_of_hash=lambda digest, count: replace(STORED.key, content_hash=digest, num_tokens=count),
        max_stored_tokens=None,
        fits=lambda count, context: True,
    )
    bringer = Bringer(
        cache,
        fetcher,
        SimpleNamespace(place=lambda moves, blocks, start: None),
        Filler(),
        [16],
        LoadImages(None),
        ranks=SimpleNamespace(all_have=list, together=lambda work, what: work()),
        timer=StageTimer(ChunkStats(), torch.device("cpu")),
        stats=ChunkStats(),
    )
    first, second = (STORED.tokens, OTHER) if is_stored_first else (OTHER, STORED.tokens)
    load = ChunkLoad(
        request_id="request",
        prompt=ChunkedPrompt((1, 1, *first, *second, *first, 2), (Span(2, 6), Span(6, 10), Span(10, 14))),
        digests=(STORED.key.content_hash,) * 3,
        ratio=0,
        policy="none",
        start=0,
        end=14,
        shared_until=0,
        blocks=((0,),),
        spare=(),
        is_findable=False,
        fill=fill,
        is_sliced=False,
        is_reported=False,
    )
    with ExitStack() as pins:
        brought = bringer.bring(load, pins)
    fetcher.close()
    for entry, at in brought.moves:
        assert entry.tokens == load.prompt.token_ids[at : at + 4]
    assert len(brought.moves) == (2 if fill or is_stored_first else 0)
