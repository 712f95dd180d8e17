"""The report of an HTTP request, from the engine to the answer."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any


class ReportNote:
    """Holds the report of one HTTP request until its answer ends."""

    def __init__(self) -> None:
        self.is_asked_for = False
        self.report: Mapping[str, Any] | None = None

    def take(self, sent: Any) -> None:
        """Keep a report that the engine sent. If an HTTP request has several prompts, the first report counts."""
        if self.report is None and isinstance(sent, Mapping):
            self.report = sent


_current: ContextVar[ReportNote | None] = ContextVar("kvmosaic_report", default=None)


def keep_report(note: ReportNote) -> None:
    """Use ``note`` for the HTTP request that this task and the tasks that it starts serve."""
    _current.set(note)


def report_taker() -> Callable[[Any], None] | None:
    """The function that takes the report of the current HTTP request, if it asks for one."""
    note = _current.get()
    return note.take if note is not None and note.is_asked_for else None
