"""The remaining runs of requests that are loaded in several steps."""

from collections.abc import Collection

from kvmosaic.engines.vllm.forward.runs import Run, cut
from kvmosaic.engines.vllm.messages import ChunkLoad


class Slices:
    """Hands out the runs of requests in order, some tokens at a time, and says which requests are done."""

    def __init__(self) -> None:
        self._left: dict[str, list[Run]] = {}
        self._loads: dict[str, ChunkLoad] = {}
        self._done: set[str] = set()

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return bool(self._left)

    def __contains__(self, request_id: str) -> bool:
        """Whether anything is left of a request."""
        return request_id in self._left

    @property
    def loads(self) -> list[ChunkLoad]:
        """The tasks of which something is left, in the order of :meth:`go_on`."""
        return [self._loads[request_id] for request_id in self._left]

    def begin(self, request_id: str, runs: list[Run], room: int | None, load: ChunkLoad | None = None) -> list[Run]:
        """The first ``room`` tokens of a request's runs, or all of them if it is ``None``. The other tokens are
        kept, and so is the task ``load`` that they are part of."""
        now, later = (runs, []) if room is None else cut(runs, room)
        if later:
            self._left[request_id] = later
            if load is not None:
                self._loads[request_id] = load
        else:
            self._left.pop(request_id, None)
            self._loads.pop(request_id, None)
            self._done.add(request_id)
        return now

    def go_on(self, room: int) -> list[list[Run]]:
        """The next ``room`` tokens of each request."""
        return [self.begin(request_id, runs, room) for request_id, runs in list(self._left.items())]

    def take_done(self, unwanted: Collection[str]) -> set[str]:
        """Requests that were completed since the last call. Requests that are ``unwanted`` need no more tokens, and
        count as completed."""
        for request_id in self._left.keys() & set(unwanted):
            self.begin(request_id, [], 0)
        done, self._done = self._done, set()
        return done
