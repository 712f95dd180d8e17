"""Worker side: what is left to compute of requests that are loaded in several steps."""

from collections.abc import Collection

from kvmosaic.engines.vllm.forward.runs import Row, cut


class Slices:
    """Hands out the rows of requests in order, some tokens at a time, and says whose are all done."""

    def __init__(self) -> None:
        self._left: dict[str, list[Row]] = {}
        self._done: set[str] = set()

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return bool(self._left)

    def begin(self, request_id: str, rows: list[Row], room: int) -> list[Row]:
        """The first ``room`` tokens of a request's rows; the others are kept."""
        now, later = cut(rows, room)
        if later:
            self._left[request_id] = later
        else:
            self._left.pop(request_id, None)
            self._done.add(request_id)
        return now

    def go_on(self, room: int) -> list[list[Row]]:
        """The next ``room`` tokens of each request."""
        return [self.begin(request_id, rows, room) for request_id, rows in list(self._left.items())]

    def take_done(self, unwanted: Collection[str]) -> set[str]:
        """Requests of which nothing is left since the last call. Those ``unwanted`` need no more."""
        for request_id in self._left.keys() & set(unwanted):
            self.begin(request_id, [], 0)
        done, self._done = self._done, set()
        return done
