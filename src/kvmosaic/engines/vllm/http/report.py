"""The report of an HTTP request, from the engine to the answer."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any


class ReportNote:
    """Where the report of one HTTP request is kept until its answer ends."""

    def __init__(self) -> None:
        self.is_asked_for = False
        self.report: Mapping[str, Any] | None = None

    def take(self, sent: Any) -> None:
        """Note what the engine sent. Of an HTTP request with several prompts, the first report counts."""
        if self.report is None and isinstance(sent, Mapping):
            self.report = sent


_current: ContextVar[ReportNote | None] = ContextVar("kvmosaic_report", default=None)


def keep_report(note: ReportNote) -> None:
    """Make ``note`` that of the HTTP request which is served by this task and by those that it starts."""
    _current.set(note)


def report_taker() -> Callable[[Any], None] | None:
    """Whom to give the report of the current HTTP request to, if it asks for one."""
    note = _current.get()
    return note.take if note is not None and note.is_asked_for else None
