"""The report of an HTTP request, from the engine to the answer and to the page."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.vllm.compat.api_server import Answered
from kvmosaic.engines.vllm.http.recent import RecentRequests


class ReportNote:
    """Holds the report of one HTTP request until its answer ends."""

    def __init__(self) -> None:
        self.is_asked_for = False
        """Whether the client asked for a report."""
        self.report: Mapping[str, Any] | None = None

    def take(self, sent: Any) -> None:
        """Keep a report that the engine sent. If an HTTP request has several prompts, the first report counts."""
        if self.report is None and isinstance(sent, Mapping):
            self.report = sent


_current: ContextVar[ReportNote | None] = ContextVar("kvmosaic_report", default=None)


def keep_report(note: ReportNote) -> None:
    """Use ``note`` for the HTTP request that this task and the tasks that it starts serve."""
    _current.set(note)


class ReportRoutes:
    """Where reports go: to the page, and to clients that asked for one and may have it."""

    def __init__(self, config: ChunkCacheConfig, recent: RecentRequests | None) -> None:
        """``recent``: what the page shows; ``None`` if there is no page."""
        self._config = config
        self._recent = recent

    def taker(self) -> Callable[[Answered], Any] | None:
        """The function that takes the report of the current HTTP request, and returns what its client may see of it;
        ``None`` if no reader needs it."""
        note = _current.get()
        if not self._config.chunk_page and (note is None or not note.is_asked_for):
            return None
        return lambda answered: self._pass_on(answered, note)

    def _pass_on(self, answered: Answered, note: ReportNote | None) -> Any:
        if self._recent is not None:
            self._recent.add(answered)
        if not self._config.clients_get_reports:
            return None
        if note is None:  # a path that we do not follow; there, only clients themselves ask
            return answered.params
        if not note.is_asked_for:
            return None
        note.take(answered.params)
        return answered.params
