"""Printing for people (tables, progress) and for programs (one JSON line)."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
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
from rich.text import Text

console = Console(stderr=True)
"""Console on stderr, for progress and errors."""

SECONDS_PER_LINE = 10.0
"""Minimum time between two lines of progress in a log."""

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object, with nothing else on stdout.")
]
ModelOption = Annotated[
    str,
    typer.Option(
        help="Model: a catalog name (see `kvmosaic models ls`), a folder, or a Hugging Face name like owner/name."
    ),
]


@contextmanager
def reporting(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text``, then every text that is passed to the yielded function. A terminal shows only the latest one.
    Elsewhere each is printed on its own line, so that a log shows the progress."""
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
    else:

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        say(text)
        yield say


def print_line(text: str, json: bool) -> None:
    """Print a line of the result for people: to stdout, or to stderr if stdout is for JSON."""
    _results(json).print(text, markup=False, highlight=False, soft_wrap=True)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], json: bool) -> None:
    """Print a table of the result for people: to stdout, or to stderr if stdout is for JSON."""
    table = Table(title=title, title_justify="left", title_style="", header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=True, justify="left" if index == 0 else "right")
    for row in rows:
        # As texts: settings may contain brackets, which would count as markup.
        table.add_row(*(Text(f"{cell:.3f}" if isinstance(cell, float) else str(cell)) for cell in row))
    _results(json).print(table)


def _results(json: bool) -> Console:
    target = sys.stderr if json else sys.stdout
    return Console(file=target, width=None if target.isatty() else 1000)


def print_json(result: dict[str, Any]) -> None:
    """Print the result as one line on stdout."""
    sys.stdout.write(json.dumps(result, default=str) + "\n")
    sys.stdout.flush()


class Steps:
    """A progress bar over a known number of steps. Where there is no terminal, lines show the progress."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._total = total
        self._printed = monotonic()

    def start(self, description: str) -> None:
        self._progress.update(self._task, description=description)
        self._print_line()

    def done(self) -> None:
        self._progress.advance(self._task)
        self._print_line()

    def reach(self, done: int) -> None:
        """Set the number of finished steps."""
        self._progress.update(self._task, completed=done)
        self._print_line()

    def tell(self, result: str) -> None:
        """Print a result that is known before the command ends. It stays above the bar."""
        console.print(result, markup=False, highlight=False, soft_wrap=True)

    def _print_line(self) -> None:
        if console.is_terminal or monotonic() - self._printed < SECONDS_PER_LINE:
            return
        self._printed = monotonic()
        task = self._progress.tasks[0]
        line = f"{task.completed:.0f} of {self._total} {task.description}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(total: int) -> Iterator[Steps]:
    """Show the progress of a long command. The bar disappears when the command ends."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        yield Steps(progress, total)
