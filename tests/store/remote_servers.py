"""Real servers on free ports of this machine, which tests kill and restart."""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from tests.required import missing

HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 512 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
time.sleep(3600)
"""
DEADLINE_S = 10.0
"""Deadline in tests that are not about deadlines, on machines that may be busy."""
CLIENT_TTL_S = 600
"""Seconds for which a Mooncake master keeps a silent holder and its values. On two busy cores a holder may get no
processor time for several seconds."""


def need_mooncake() -> None:
    """Skip tests of Mooncake's client if it is missing."""
    if find_spec("mooncake") is None:
        missing("there is no package mooncake-transfer-engine-non-cuda")
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        missing(f"Mooncake cannot be loaded ({error})")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"nothing listens on port {port}")


class Process:
    """A server that can be killed, stopped for a while, and restarted at the same address."""

    def __init__(self, command: list[str], folder: Path, port: int | None) -> None:
        self._command, self._folder, self._port = command, folder, port
        self.start()
        atexit.register(self.kill)  # a failing test may not reach this

    def start(self) -> None:
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, stdout=subprocess.PIPE, stderr=log, text=True
            )
        if self._port is not None:
            wait_for(self._port)
        else:
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until it has stopped; before, it may still answer

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)


class Valkey:
    """A Valkey or Redis server, with or without a file that keeps its data."""

    kind = "valkey"

    def __init__(self, folder: Path, persistent: bool = False, tls: bool = False, **more: str) -> None:
        """``more`` are options of the server, with underscores for hyphens."""
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            missing("there is no valkey-server or redis-server")
        assert program is not None
        self.port = free_port()
        self.url = f"valkey{'s' if tls else ''}://127.0.0.1:{self.port}"
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "yes" if persistent else "no"}
        options |= {"port": 0, "tls-port": self.port} if tls else {}
        options |= {name.replace("_", "-"): value for name, value in more.items()}
        words = [(f"--{name}", *(str(value).split() or [""])) for name, value in options.items()]
        command = [program, *(part for line in words for part in line)]
        self.server = Process([*command, "--appendfsync", "always", "--logfile", "server.log"], folder, self.port)
        self._is_persistent = persistent and not tls

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        """Start the server. It listens before it has read its file, and refuses calls until then."""
        self.server.start()
        while self._is_persistent and b"LOADING" in self._ping():
            time.sleep(0.02)

    def _ping(self) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), 20) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(100)


class Mooncake:
    """A master and a holder."""

    kind = "mooncake"

    def __init__(self, folder: Path, **more: int) -> None:
        """``more`` are options of the master."""
        need_mooncake()
        from mooncake import store

        self.port, metrics_port = free_port(), free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}?metrics_port={metrics_port}"
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": metrics_port,
            "client_ttl": CLIENT_TTL_S,
            "rpc_thread_num": 2,
            "logtostderr": 1,
        } | more
        program = str(Path(store.__file__).with_name("mooncake_master"))
        self.server = Process([program, *(f"--{name}={value}" for name, value in options.items())], folder, self.port)
        self.holder = Process([sys.executable, "-c", HOLDER, f"127.0.0.1:{self.port}"], folder, None)

    def kill(self) -> None:
        self.server.kill()
        self.holder.kill()

    def start(self) -> None:
        self.server.start()
        self.holder.start()
