"""Pieces of Markdown."""

from collections.abc import Iterable


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table. A cell may only have bars inside code, where they do not end it."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: str) -> str:
    """Text in the code font, or a dash for none."""
    return f"`{text}`" if text else "–"


def prose(docstring: str) -> str:
    """A docstring on one line, with Markdown's marks for code."""
    return " ".join(docstring.split()).replace("``", "`")
