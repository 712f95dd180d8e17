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
    """What is wrong and what to do about it."""


def guard(check: str, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows of a check; whatever goes wrong in it becomes one that fails."""
    try:
        yield from rows
    except Exception as error:
        yield Row(check, "fail", type(error).__name__, reason(error))


def reason(error: Exception) -> str:
    """What an error says, in one line: mostly the last, which in pydantic's is a link to its documentation."""
    if isinstance(error, ValidationError):
        messages = (item["msg"] for item in error.errors(include_url=False, include_context=False))
        return "; ".join(" ".join(message.removeprefix("Value error, ").split()) for message in messages)
    lines = str(error).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), type(error).__name__)
