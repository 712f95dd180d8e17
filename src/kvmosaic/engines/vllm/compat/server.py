"""``vllm serve``, run in this process."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvmosaic.core.errors import ConfigError


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, which says in one line, as an error, what is wrong."""

    def print_usage(self, file: Any = None) -> None:
        """Print nothing: argparse calls this before an error only."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if status == 0:
            super().exit(status, message)
        raise ConfigError(" ".join((message or "").rpartition("error: ")[2].split()))


class ServeCommand:
    """Runs ``vllm serve`` without vLLM's own ``main()``, which asks for the version of a distribution named "vllm":
    CPU builds have other names."""

    def __init__(self) -> None:
        self._command = ServeSubcommand()

    def parse(self, model: str, options: Sequence[str]) -> Namespace:
        """The options of ``vllm serve MODEL``, as vLLM understands them. Raises :class:`ConfigError`, with one line,
        if they are wrong."""
        sys.argv = ["vllm", "serve", model, *options]  # vLLM also reads it
        parser = _Parser()
        self._command.subparser_init(parser.add_subparsers(dest="subparser"))
        try:
            parsed: Namespace = parser.parse_args(sys.argv[1:])
            self._command.validate(parsed)
        except (TypeError, ValueError) as error:
            raise ConfigError(" ".join(str(error).removeprefix("Error: ").split())) from error
        return parsed

    def engine_args(self, parsed: Namespace) -> Any:
        """The engine arguments of these options."""
        parsed.model = parsed.model_tag  # as the command itself does later
        return AsyncEngineArgs.from_cli_args(parsed)

    def run(self, parsed: Namespace) -> None:
        """Serve until the process is told to stop."""
        self._command.cmd(parsed)
