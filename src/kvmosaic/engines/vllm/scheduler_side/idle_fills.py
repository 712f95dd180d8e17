"""Missing chunks of adapters that no request of a step uses: they can be filled only while the adapter is active."""

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable

from kvmosaic.engines.vllm.messages import Adapter
from kvmosaic.engines.vllm.scheduler_side.fair_queue import MAX_WAITING_TOKENS, WaitingChunk

IDLE_SECONDS = 60.0
"""Time, in seconds, after which the chunks of an adapter that no request uses are dropped."""


class IdleFills:
    """Chunks by adapter. The adapters come in the order in which they became idle, or got their latest chunk."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[Adapter, OrderedDict[bytes, WaitingChunk]] = OrderedDict()
        self._since: dict[Adapter, float] = {}
        self._weight = 0
        self._dropped = 0

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def get(self, adapter: Adapter, digest: bytes) -> WaitingChunk | None:
        """The chunk of an adapter, if it waits."""
        mine = self._chunks.get(adapter)
        return None if mine is None else mine.get(digest)

    def add(self, chunks: Iterable[WaitingChunk]) -> None:
        """Keep chunks of adapters until these are active. If there are too many, those that have been idle for
        longest are dropped."""
        for chunk in chunks:
            assert chunk.adapter is not None
            self._since[chunk.adapter] = time.monotonic()
            mine = self._chunks.setdefault(chunk.adapter, OrderedDict())
            self._chunks.move_to_end(chunk.adapter)
            if chunk.digest not in mine:
                mine[chunk.digest] = chunk
                self._weight += chunk.weight
        while self._weight > MAX_WAITING_TOKENS:
            adapter, mine = next(iter(self._chunks.items()))
            self._weight -= mine.popitem(last=False)[1].weight
            self._dropped += 1
            if not mine:
                self._forget(adapter)

    def wake(self, active: Collection[Adapter]) -> list[WaitingChunk]:
        """Take the chunks of adapters that are ``active``."""
        return [chunk for adapter in list(self._chunks) if adapter in active for chunk in self._forget(adapter)]

    def drop(self) -> int:
        """Drop the chunks of adapters that have been idle for :data:`IDLE_SECONDS`. Returns the number of chunks that
        were dropped since the last call."""
        latest = time.monotonic() - IDLE_SECONDS
        while self._chunks and self._since[next(iter(self._chunks))] < latest:
            self._dropped += len(self._forget(next(iter(self._chunks))))
        dropped, self._dropped = self._dropped, 0
        return dropped

    def clear(self) -> None:
        for adapter in list(self._chunks):
            self._forget(adapter)

    def _forget(self, adapter: Adapter) -> list[WaitingChunk]:
        del self._since[adapter]
        chunks = list(self._chunks.pop(adapter).values())
        self._weight -= sum(chunk.weight for chunk in chunks)
        return chunks
