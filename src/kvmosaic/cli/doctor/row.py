"""One line of the doctor's report, and how an error becomes one."""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from pydantic import ValidationError

GIB = 2**30


class Row(NamedTuple):
    """One line of the report."""

    check: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
    """The problem, and what to do about it."""


def guard(check: str, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of a check. An exception in it becomes a failed row."""
    try:
        yield from rows
    except Exception as error:
        yield Row(check, "fail", type(error).__name__, reason(error))


def reason(error: Exception) -> str:
    """The message of an error in one line: its last line. The last line of pydantic's errors is a link to its
    documentation, so their messages are joined instead."""
    if isinstance(error, ValidationError):
        messages = (item["msg"] for item in error.errors(include_url=False, include_context=False))
        return "; ".join(" ".join(message.removeprefix("Value error, ").split()) for message in messages)
    lines = str(error).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), type(error).__name__)
