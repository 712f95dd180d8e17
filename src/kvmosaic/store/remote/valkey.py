"""Values in a Valkey or Redis server."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.store.remote.base import ABSENT, FAILED, Incoming, RefusedError, RemoteClient, Value
from kvmosaic.store.remote.resp import Connection, Reply

T = TypeVar("T")

SCAN_COUNT = 1000


class ValkeyClient(RemoteClient):
    """One plain string per key. Eviction and persistence are up to the server. Threads share a pool of connections
    that grows with their number."""

    max_value_bytes = 512 * 2**20  # the servers' default proto-max-bulk-len

    def __init__(self, url: RemoteUrl, patience_s: float) -> None:
        """Connects on first use. ``patience_s`` is the maximum silence of the server, in seconds."""
        self._url = url
        self._patience_s = patience_s
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [reply == 1 for reply in self._ask([("EXISTS", key) for key in keys])]

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        replies = self._ask([("STRLEN", key) for key in keys])
        return [reply if isinstance(reply, int) and reply > 0 else None for reply in replies]

    def put(self, keys: Sequence[str], values: Sequence[Callable[[], Value]]) -> list[str | None]:
        def put(connection: Connection) -> list[Reply]:
            connection.send(("SET", key, value()) for key, value in zip(keys, values, strict=True))
            return [connection.reply() for _ in keys]

        return [str(reply) if isinstance(reply, RefusedError) else None for reply in self._use(put)]

    def get_into(self, keys: Sequence[str], incoming: Incoming) -> list[int]:
        def get(connection: Connection) -> list[int]:
            connection.send([("GET", key) for key in keys])
            lengths = []
            for index in range(len(keys)):
                length = connection.value_into(partial(incoming.buffers_for, index))
                lengths.append(FAILED if isinstance(length, RefusedError) else length)
                if lengths[-1] not in (ABSENT, FAILED):
                    incoming.received(index)
            return lengths

        return self._use(get)

    def delete(self, keys: Sequence[str]) -> None:
        # UNLINK frees the memory in a background thread of the server, so that other clients need not wait.
        self._ask([("UNLINK", key) for key in keys])

    def scan(self, prefix: str) -> Iterator[list[str]]:
        cursor = "0"
        while True:
            [reply] = self._ask([("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", str(SCAN_COUNT))])
            match reply:
                case [bytes(after), [*names]]:
                    cursor = after.decode()
                    yield [name.decode(errors="replace") for name in names if isinstance(name, bytes)]
                case _:
                    raise ConnectionError("not the reply of a Valkey server to SCAN")
            if cursor == "0":
                return

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, commands: Sequence[Sequence[str | Value]]) -> list[Reply]:
        def ask(connection: Connection) -> list[Reply]:
            connection.send(commands)
            return [connection.reply() for _ in commands]

        return self._use(ask)

    def _use(self, action: Callable[[Connection], T]) -> T:
        """Run ``action`` with an idle connection. If the server may have been restarted since that was last used, run
        it again with a new one: all our actions can be repeated."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return self._finish(connection, action)
            except ConnectionError:  # but no timeout, which is no sign of a restart
                self.close()  # the other idle connections are dead as well
        return self._finish(Connection(self._url, self._patience_s), action)

    def _finish(self, connection: Connection, action: Callable[[Connection], T]) -> T:
        try:
            result = action(connection)
        except BaseException:
            connection.close()  # pending replies would be taken for those of the next command
            raise
        with self._lock:
            self._idle.append(connection)
        return result
