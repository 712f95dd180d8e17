"""``kvmosaic serve`` in a separate process."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 900


@contextmanager
def serving(model: str, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """The URL of a server for ``model``, as long as it is needed."""
    command = [sys.executable, "-m", "kvmosaic.cli.main", "serve", model, "--enable-chunk-cache", *options]
    with served_by(command, log, **environment) as url:
        yield url


@contextmanager
def served_by(command: list[str], log: Path, **environment: str) -> Iterator[str]:
    """The URL of a server that ``command`` starts, as long as it is needed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment},
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_up(url):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:  # a server that is just starting may lose the signal
            server.kill()
            raise


def _is_up(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=2)
    except OSError:
        return False
    return True
