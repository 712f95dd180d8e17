"""A queue of missing chunks, in which requests take turns."""

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmosaic.engines.vllm.messages import Adapter

MAX_WAITING_TOKENS = 2**21
"""Maximum number of waiting tokens, including contexts."""
LEAST_WEIGHT = 512
"""Minimum number of tokens that a chunk counts as, so that there are never more than 4,096 chunks."""
MAX_TRIES = 256
"""Maximum number of steps with too few free blocks for a chunk before it is forgotten. The next request that lacks it
queues it again."""


@dataclass
class WaitingChunk:
    """A chunk that some request lacked."""

    request_id: str
    digest: bytes
    tokens: tuple[int, ...]
    context: tuple[int, ...]
    """Tokens that it is computed after."""
    adapter: Adapter | None = None
    """The adapter that it is computed with, if any."""
    since: float = field(default_factory=lambda: time.monotonic())
    tries: int = 0
    """Number of steps that passed it over."""

    @property
    def length(self) -> int:
        """Number of its tokens, including its context."""
        return len(self.context) + len(self.tokens)

    @property
    def weight(self) -> int:
        return max(LEAST_WEIGHT, self.length)


class FairQueue:
    """Waiting chunks, in a queue for each request. The queues take turns, so that a request with thousands of chunks
    delays a chunk of another request by only one of them. If there are too many chunks, the longest queue drops its
    oldest."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[WaitingChunk]] = OrderedDict()
        self._waiting: dict[bytes, WaitingChunk] = {}
        self._weights: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of waiting chunks."""
        return len(self._waiting)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._waiting

    @property
    def oldest(self) -> float:
        """Time at which the oldest chunk began to wait."""
        return min(chunk.since for chunk in self._waiting.values())

    def add(self, chunks: Iterable[WaitingChunk]) -> None:
        """Queue chunks that do not wait already."""
        for chunk in chunks:
            if chunk.digest not in self._waiting:
                self._queue(chunk).append(chunk)
        self._trim()

    def next(self) -> WaitingChunk:
        """The chunk whose turn it is."""
        return next(iter(self._queues.values()))[0]

    def take(self) -> WaitingChunk:
        """Remove the chunk whose turn it is from the queue, and pass the turn to the next request."""
        request_id, queue = next(iter(self._queues.items()))
        self._queues.move_to_end(request_id)
        return self._drop_first(request_id, queue)

    def skip(self) -> None:
        """Pass the turn to the next request."""
        self._queues.move_to_end(next(iter(self._queues)))

    def pass_over(self) -> None:
        """Move the chunk whose turn it is to the end of its queue, and pass the turn to the next request. After
        :data:`MAX_TRIES`, the chunk is dropped instead."""
        chunk = self.take()
        chunk.tries += 1
        if chunk.tries < MAX_TRIES:
            self._queue(chunk).append(chunk)

    def put_back(self, chunk: WaitingChunk) -> None:
        """Queue a chunk again that was taken. It has the next turn."""
        if chunk.digest not in self._waiting:
            self._queue(chunk).appendleft(chunk)
            self._queues.move_to_end(chunk.request_id, last=False)

    def take_all_of(self, adapter: Adapter) -> list[WaitingChunk]:
        """Remove the chunks of an adapter from the queue. All chunks of a request have the same adapter."""
        theirs = [(name, queue) for name, queue in self._queues.items() if queue[0].adapter == adapter]
        return [self._drop_first(name, queue) for name, queue in theirs for _ in range(len(queue))]

    def clear(self) -> None:
        self._queues.clear()
        self._waiting.clear()
        self._weights.clear()

    def _queue(self, chunk: WaitingChunk) -> deque[WaitingChunk]:
        """The queue for a chunk, which is counted as waiting."""
        self._waiting[chunk.digest] = chunk
        self._weights[chunk.request_id] = self._weights.get(chunk.request_id, 0) + chunk.weight
        return self._queues.setdefault(chunk.request_id, deque())

    def _drop_first(self, request_id: str, queue: deque[WaitingChunk]) -> WaitingChunk:
        chunk = queue.popleft()
        del self._waiting[chunk.digest]
        self._weights[request_id] -= chunk.weight
        if not queue:
            del self._queues[request_id], self._weights[request_id]
        return chunk

    def _trim(self) -> None:
        excess = sum(self._weights.values()) - MAX_WAITING_TOKENS
        if excess <= 0:
            return
        longest = [(-weight, request_id) for request_id, weight in self._weights.items()]
        heapq.heapify(longest)
        while excess > 0:
            _, request_id = heapq.heappop(longest)
            excess -= self._drop_first(request_id, self._queues[request_id]).weight
            if request_id in self._weights:
                heapq.heappush(longest, (-self._weights[request_id], request_id))
