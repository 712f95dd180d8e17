"""The command line in this process: starting one costs seconds of imports, of which most tests learn nothing."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from kvmosaic.cli.main import main


def run_here(*arguments: object, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    """What a process of the command would return; it leaves the environment as it was."""
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
