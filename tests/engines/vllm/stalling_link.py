"""A network link that stalls in the middle of a transfer."""

import socket
import threading
from typing import Literal

Direction = Literal["up", "down"]


class StallingLink:
    """Forwards connections to a server on this machine: ``up`` to it, ``down`` from it."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._stalled: Direction | None = None
        self._left = 0
        self.stalled = threading.Event()
        """Set once something is held back."""
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self, direction: Direction, after: int) -> None:
        """Let ``after`` more bytes through in one direction, on all connections together, then nothing."""
        self._stalled, self._left = direction, after

    def cut(self) -> None:
        """Close all connections, as happens when a machine at one end dies; new ones work."""
        self._stalled = None
        self.stalled.clear()
        ends, self._ends = self._ends, []
        for end in ends:
            end.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._ends += [client, server]
            threading.Thread(target=self._forward, args=(client, server, "up"), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, "down"), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        try:
            while data := source.recv(2**16):
                if direction == self._stalled:
                    data, self._left = data[: self._left], max(0, self._left - len(data))
                target.sendall(data)
                if direction == self._stalled and self._left == 0:
                    self.stalled.set()
                    return  # and both ends stay open
            target.shutdown(socket.SHUT_WR)
        except OSError:  # cut
            pass
