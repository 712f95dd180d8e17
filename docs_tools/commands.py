"""The reference page about the command line."""

from collections.abc import Iterator
from typing import Any

import typer

from docs_tools.markup import code, prose, table
from kvmosaic.cli.main import app


def commands_page() -> str:
    """All commands, with their arguments and options."""
    text = """# Command line

An error is one line, with exit status 2. Most commands take `--json` and then print one JSON object, and nothing
else, on stdout.
"""
    for name, command in commands():
        text += f"\n## `{name}`\n\n{prose(command.help)}\n"
        records = [(each, each.get_help_record(typer.Context(command))) for each in command.params]
        for kind in ("argument", "option"):
            rows = [(code(record[0]), prose(record[1])) for each, record in records if each.param_type_name == kind]
            text += f"\n{table((kind, 'meaning'), rows)}" if rows else ""
    return text


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its whole name."""
    return _below("kvmosaic", typer.main.get_command(app))


def _below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
        return
    for word, each in command.commands.items():
        yield from _below(f"{name} {word}", each)
