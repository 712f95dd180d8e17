"""Runs the command line in this process. A process of its own would spend seconds on imports, which most tests do not
need."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from kvmosaic.cli.main import main


def run_here(*arguments: object, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """Output and exit status, as a process of the command would return them. The environment is restored."""
    command = ["kvmosaic", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        mock.patch.dict(os.environ),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        status = _status_of(main)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


def _status_of(command: Callable[[], None]) -> int:
    try:
        command()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
