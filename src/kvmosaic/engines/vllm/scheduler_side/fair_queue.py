"""A queue of missing chunks, in which requests take turns."""

import heapq
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from kvmosaic.engines.vllm.messages import Adapter, Images

MAX_WAITING_TOKENS = 2**21
"""Maximum number of waiting tokens, including contexts."""
LEAST_WEIGHT = 512
"""Minimum number of tokens that a chunk counts as, so that there are never more than 4,096 chunks."""
BYTES_PER_TOKEN = 512
"""Number of bytes of images that count as a token, so that the pixels that wait with chunks never have more than 1
GiB. A token of an image may have 50 kB, depending on the model."""
MAX_TRIES = 256
"""Maximum number of steps with too few free blocks for a chunk before it is forgotten, not counting those in which
another chunk holds blocks. The next request that lacks it queues it again."""


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
    images: Images | None = None
    """The chunk with its images, if it has any."""
    since: float = field(default_factory=lambda: time.monotonic())
    """Time at which it began to wait, or to be wanted, in seconds."""
    is_wanted: bool = False
    """Whether a request waits for it, or several requests asked for it."""
    tries: int = 0
    """Number of steps that passed it over."""

    @property
    def length(self) -> int:
        """Number of its tokens, including its context."""
        return len(self.context) + len(self.tokens)

    @cached_property
    def weight(self) -> int:
        """Number of tokens that it counts as."""
        pixels = 0 if self.images is None else self.images.nbytes
        return max(LEAST_WEIGHT, self.length) + pixels // BYTES_PER_TOKEN


class FairQueue:
    """Waiting chunks, in a queue for each request. The queues take turns, so that a request with thousands of chunks
    delays a chunk of another request by only one of them. If there are too many chunks, the longest queue drops its
    oldest."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, OrderedDict[bytes, WaitingChunk]] = OrderedDict()
        self._waiting: OrderedDict[bytes, WaitingChunk] = OrderedDict()
        """Waiting chunks by digest, oldest first."""
        self._weights: dict[str, int] = {}
        """Total weight of each request's chunks."""
        self._weight = 0
        """Total weight of all chunks."""

    def __len__(self) -> int:
        """Number of waiting chunks."""
        return len(self._waiting)

    @property
    def oldest(self) -> float:
        """Time at which the chunk that came first began to wait, or to be wanted."""
        return self._first.since

    def add(self, chunks: Iterable[WaitingChunk]) -> None:
        """Queue chunks that do not wait already."""
        for chunk in chunks:
            if chunk.digest not in self._waiting:
                self._queue(chunk)
        self._trim()

    def get(self, digest: bytes) -> WaitingChunk | None:
        """The chunk, if it waits."""
        return self._waiting.get(digest)

    def next(self) -> WaitingChunk:
        """The chunk whose turn it is."""
        return next(iter(next(iter(self._queues.values())).values()))

    def take(self) -> WaitingChunk:
        """Remove the chunk whose turn it is from the queue, and pass the turn to the next request."""
        chunk = self.next()
        self._queues.move_to_end(chunk.request_id)
        return self.remove(chunk)

    def skip(self) -> None:
        """Pass the turn to the next request."""
        self._queues.move_to_end(next(iter(self._queues)))

    def pass_over(self, *, is_try: bool) -> None:
        """Move the chunk whose turn it is to the end of its queue, and pass the turn to the next request. After
        :data:`MAX_TRIES` tries, the chunk is dropped instead."""
        chunk = self.next()
        chunk.tries += is_try
        self._queues[chunk.request_id].move_to_end(chunk.digest)
        self.skip()
        if chunk.tries == MAX_TRIES:
            self.remove(chunk)

    def put_back(self, chunk: WaitingChunk) -> None:
        """Queue a chunk again that was taken. It has the next turn."""
        if chunk.digest not in self._waiting:
            self._queue(chunk)
            self._waiting.move_to_end(chunk.digest, last=False)
            self._queues[chunk.request_id].move_to_end(chunk.digest, last=False)
            self._queues.move_to_end(chunk.request_id, last=False)

    def take_all_of(self, adapters: Collection[Adapter]) -> list[WaitingChunk]:
        """Remove the chunks of adapters from the queue."""
        return [self.remove(chunk) for chunk in list(self._waiting.values()) if chunk.adapter in adapters]

    def remove(self, chunk: WaitingChunk) -> WaitingChunk:
        """Remove a chunk that waits."""
        request_id = chunk.request_id
        del self._waiting[chunk.digest], self._queues[request_id][chunk.digest]
        self._weights[request_id] -= chunk.weight
        self._weight -= chunk.weight
        if not self._queues[request_id]:
            del self._queues[request_id], self._weights[request_id]
        return chunk

    def drop_before(self, time: float) -> int:
        """Drop the chunks that came first, as long as they wait since before ``time``. Returns their number."""
        dropped = 0
        while self._waiting and self._first.since < time:
            self.remove(self._first)
            dropped += 1
        return dropped

    def clear(self) -> None:
        self._queues.clear()
        self._waiting.clear()
        self._weights.clear()
        self._weight = 0

    @property
    def _first(self) -> WaitingChunk:
        return next(iter(self._waiting.values()))

    def _queue(self, chunk: WaitingChunk) -> None:
        """Put a chunk at the end of its request's queue."""
        self._waiting[chunk.digest] = chunk
        self._weights[chunk.request_id] = self._weights.get(chunk.request_id, 0) + chunk.weight
        self._weight += chunk.weight
        self._queues.setdefault(chunk.request_id, OrderedDict())[chunk.digest] = chunk

    def _trim(self) -> None:
        if self._weight <= MAX_WAITING_TOKENS:
            return
        longest = [(-weight, request_id) for request_id, weight in self._weights.items()]
        heapq.heapify(longest)
        while self._weight > MAX_WAITING_TOKENS:
            _, request_id = heapq.heappop(longest)
            self.remove(next(iter(self._queues[request_id].values())))
            if request_id in self._weights:
                heapq.heappush(longest, (-self._weights[request_id], request_id))
