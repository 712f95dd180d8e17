"""Which requests asked for chunks that are not stored."""

from collections import OrderedDict

from kvmosaic.engines.vllm.scheduler_side.fair_queue import WaitingChunk

MAX_REMEMBERED = 2**16
"""Maximum number of chunks whose first asker is remembered."""


class Askers:
    """The first request that asked for each chunk, also of chunks that were dropped because too many waited, or for
    too long. On a busy server, a chunk that is asked for every few minutes would otherwise count as new each time."""

    def __init__(self) -> None:
        self._first: OrderedDict[bytes, int] = OrderedDict()
        """Hash of the first asker's id, by chunk: nothing keeps the ids of requests that have ended."""

    def has_other(self, chunk: WaitingChunk) -> bool:
        """Whether a request other than the chunk's own asked for it before. A request that is preempted asks
        again."""
        asker = hash(chunk.request_id)
        first = self._first.setdefault(chunk.digest, asker)
        self._first.move_to_end(chunk.digest)
        if len(self._first) > MAX_REMEMBERED:
            self._first.popitem(last=False)
        return first != asker

    def forget(self, digest: bytes) -> None:
        """The chunk is filled: if it is removed from the store, it counts as new."""
        self._first.pop(digest, None)

    def clear(self) -> None:
        self._first.clear()
