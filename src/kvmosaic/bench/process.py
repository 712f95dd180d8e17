"""Runs measurements in separate processes: vLLM keeps its connector in a global, and frees memory only when it ends.

A module that is measured this way has a function ``measure``, whose arguments and result are JSON.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from kvmosaic.core.errors import KvmosaicError

ENGINES = ("plain", "reuse")
RESULT, ERROR, STATUS = "KVMOSAIC-RESULT ", "KVMOSAIC-ERROR ", "KVMOSAIC-STATUS "
"""Prefixes of lines for the parent process; vLLM writes to the same output."""


def run_apart(module: str, arguments: dict[str, Any], progress: Callable[[str], None]) -> Any:
    """The result of a module's ``measure(**arguments)`` in a new process; ``progress`` receives its status lines."""
    command = [sys.executable, "-m", "kvmosaic.bench.process", module, json.dumps(arguments)]
    said: list[str] = []
    reason = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(RESULT):
                result = json.loads(line.removeprefix(RESULT))
                child.communicate()  # waits for the end of this process, because the next one needs its memory
                return result
            if line.startswith(ERROR):
                reason = line.removeprefix(ERROR).strip()
            elif line.startswith(STATUS):
                progress(line.removeprefix(STATUS).strip())
            else:
                said.append(line)
    with tempfile.NamedTemporaryFile("w", prefix="kvmosaic-bench-", suffix=".log", delete=False) as log:
        log.writelines(said)
    raise KvmosaicError(f"{reason or f'status {child.returncode}'} ({module} failed; its output is in {log.name})")


def compare(module: str, arguments: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """The results of ``measure(engine=…, **arguments)`` for plain vLLM and for vLLM with the chunk cache. They run
    one at a time, because they would slow each other down."""
    measured = {}
    for engine in ENGINES:

        def told(text: str, engine: str = engine) -> None:
            progress(f"{engine}: {text}")

        measured[engine] = run_apart(module, {"engine": engine, **arguments}, told)
    return measured


def tell(status: str) -> None:
    """Report the current status from inside ``measure``."""
    print(STATUS + status, flush=True)


def _main(module: str, arguments: str) -> None:
    try:
        result = importlib.import_module(module).measure(**json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        print(ERROR + " ".join(str(error).split() or [type(error).__name__]), flush=True)
        sys.exit(1)
    print(RESULT + json.dumps(result), flush=True)
    os._exit(0)  # threads of engines, like LMCache's, may wait for ever


if __name__ == "__main__":
    _main(*sys.argv[1:])
