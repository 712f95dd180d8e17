"""Printing for people (tables, progress) and for programs (one JSON line)."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

console = Console(stderr=True)
"""Progress and errors."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object, alone on stdout.")]
ModelOption = Annotated[str, typer.Option(help="Catalog name, folder or hub name.")]


@contextmanager
def reporting(text: str) -> Iterator[Callable[[str], None]]:
    """Say what is being done, and then whatever is given to the function: in one place of a terminal, and elsewhere
    line by line, so that a log tells how far it came."""
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
    else:

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        say(text)
        yield say


def print_line(text: str, json: bool) -> None:
    """A line of the result, for people: on stdout, or on stderr when stdout is for a program."""
    _results(json).print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], json: bool) -> None:
    """A table of the result, for people."""
    table = Table(title=title, title_justify="left", title_style="", header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    _results(json).print(table)


def _results(json: bool) -> Console:
    target = sys.stderr if json else sys.stdout
    return Console(file=target, width=None if target.isatty() else 1000)


def print_json(result: dict[str, Any]) -> None:
    """The result as one line on stdout."""
    sys.stdout.write(json.dumps(result, default=str) + "\n")
    sys.stdout.flush()


class Steps:
    """A progress bar over a known number of steps."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def start(self, description: str) -> None:
        self._progress.update(self._task, description=description)

    def done(self) -> None:
        self._progress.advance(self._task)

    def reach(self, done: int) -> None:
        """So many steps are done."""
        self._progress.update(self._task, completed=done)


@contextmanager
def progress_bar(total: int) -> Iterator[Steps]:
    """Shows where a long command is; vanishes when it ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        yield Steps(progress, total)
