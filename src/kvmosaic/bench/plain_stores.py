"""Plain use of the tiers' backends: no index, no checksums, no deadlines, memory that is set up once.

Each is as fast as possible, because our tiers are compared with it.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmosaic.core.remote_url import PASSWORD_VARIABLE, RemoteUrl
from kvmosaic.store.remote.mooncake import connect
from kvmosaic.store.remote.resp import Connection

PATIENCE_S = 60.0

Values = npt.NDArray[np.uint8]
"""``[entries, values of an entry, bytes]``."""


class PlainStore(ABC):
    """Writes ``sent`` and reads it back into ``received``, entry by entry."""

    title: str
    """Short name of the store, for results."""

    def __init__(self, sent: Values, received: Values) -> None:
        self.sent = sent
        self.received = received

    @abstractmethod
    def put(self) -> None: ...

    @abstractmethod
    def get(self) -> None: ...

    @abstractmethod
    def clean(self) -> None:
        """Delete everything that was put. Missing values are no error."""

    def close(self) -> None:  # noqa: B027 - memory and files hold nothing that needs closing
        """Close connections."""


class PlainServer(PlainStore):
    """A store in another process."""

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> int:
        """Number of ``keys`` that exist, whichever client wrote them."""


class Memory(PlainStore):
    """Copies to memory and back."""

    title = "memcpy"

    def __init__(self, sent: Values, received: Values) -> None:
        super().__init__(sent, received)
        self._kept = np.ones_like(sent)

    def put(self) -> None:
        for target, entry in zip(self._kept, self.sent, strict=True):
            np.copyto(target, entry)

    def get(self) -> None:
        for target, entry in zip(self.received, self._kept, strict=True):
            np.copyto(target, entry)

    def clean(self) -> None:
        pass


class Files(PlainStore):
    """A file per entry."""

    title = "write and read"

    def __init__(self, sent: Values, received: Values, folder: Path) -> None:
        super().__init__(sent, received)
        self._paths = [folder / f"plain-{entry}" for entry in range(len(sent))]

    def put(self) -> None:
        for path, entry in zip(self._paths, self.sent, strict=True):
            with open(path, "wb", buffering=0) as file:
                left = entry.reshape(-1).data
                while left:
                    left = left[file.write(left) :]

    def get(self) -> None:
        for path, target in zip(self._paths, self.received, strict=True):
            with open(path, "rb") as file:
                file.readinto(target.reshape(-1).data)

    def clean(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


class Wire(PlainServer):
    """SET and GET over one connection. The commands of an entry are sent together; values are received in place."""

    title = "SET/GET on a socket"

    def __init__(self, sent: Values, received: Values, keys: Sequence[Sequence[str]], url: RemoteUrl) -> None:
        super().__init__(sent, received)
        self._keys = keys
        self._connection = Connection(url, PATIENCE_S)

    def put(self) -> None:
        for keys, entry in zip(self._keys, self.sent, strict=True):
            self._connection.send([("SET", key, [value.data]) for key, value in zip(keys, entry, strict=True)])
            replies = [self._connection.reply() for _ in keys]
            assert replies == [b"OK"] * len(keys), f"the server would not store values: {replies}"

    def get(self) -> None:
        for keys, targets in zip(self._keys, self.received, strict=True):
            self._connection.send([("GET", key) for key in keys])
            lengths = [self._connection.value_into(partial(_into, target)) for target in targets]
            assert lengths == [target.nbytes for target in targets], f"the server would not return values: {lengths}"

    def exists(self, keys: Sequence[str]) -> int:
        self._connection.send([("EXISTS", key) for key in keys])
        return [self._connection.reply() for _ in keys].count(1)

    def clean(self) -> None:
        self._connection.send([("UNLINK", *(key for keys in self._keys for key in keys))])
        self._connection.reply()

    def close(self) -> None:
        self._connection.close()


class RedisPackage(PlainServer):
    """The servers' official client, with a pipeline per entry. It returns values in its own memory."""

    title = "redis-py"

    def __init__(self, sent: Values, received: Values, keys: Sequence[Sequence[str]], url: RemoteUrl) -> None:
        super().__init__(sent, received)
        import redis

        self._keys = keys
        password = os.environ.get(PASSWORD_VARIABLE)
        self._client: Any = redis.Redis(
            url.host, url.port, url.database, username=url.user, password=password, ssl=url.tls
        )

    def put(self) -> None:
        for keys, entry in zip(self._keys, self.sent, strict=True):
            pipeline = self._client.pipeline(transaction=False)
            for key, value in zip(keys, entry, strict=True):
                pipeline.set(key, value.data)
            pipeline.execute()

    def get(self) -> None:
        for keys, targets in zip(self._keys, self.received, strict=True):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.get(key)
            assert [len(value) for value in pipeline.execute()] == [target.nbytes for target in targets]

    def exists(self, keys: Sequence[str]) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return sum(pipeline.execute())

    def clean(self) -> None:
        self._client.unlink(*(key for keys in self._keys for key in keys))

    def close(self) -> None:
        self._client.close()


class Mooncake(PlainServer):
    """A client of Mooncake's library, with a batch per entry, from and into memory that is registered once."""

    title = "batch_put_from/batch_get_into"

    def __init__(self, sent: Values, received: Values, keys: Sequence[Sequence[str]], url: RemoteUrl) -> None:
        super().__init__(sent, received)
        from mooncake import store

        self._keys = keys
        self._store = connect(store, url, PATIENCE_S)
        for memory in (sent, received):
            assert self._store.register_buffer(memory.ctypes.data, memory.nbytes) == 0

    def put(self) -> None:
        for keys, entry in zip(self._keys, self.sent, strict=True):
            pointers, lengths = [value.ctypes.data for value in entry], [value.nbytes for value in entry]
            codes = self._store.batch_put_from(list(keys), pointers, lengths)
            assert not any(codes), f"Mooncake would not store values: {codes}"

    def get(self) -> None:
        for keys, targets in zip(self._keys, self.received, strict=True):
            pointers, lengths = [value.ctypes.data for value in targets], [value.nbytes for value in targets]
            codes = self._store.batch_get_into(list(keys), pointers, lengths)
            assert codes == lengths, f"Mooncake would not return values: {codes}"

    def exists(self, keys: Sequence[str]) -> int:
        return sum(self._store.batch_is_exist(list(keys)))

    def clean(self) -> None:
        self._store.batch_remove([key for keys in self._keys for key in keys], True)

    def close(self) -> None:
        for memory in (self.sent, self.received):
            self._store.unregister_buffer(memory.ctypes.data)
        self._store.close()


def _into(target: npt.NDArray[np.uint8], _: int) -> list[npt.NDArray[np.uint8]]:
    return [target]


def plain_stores(url: str, sent: Values, received: Values, names: str) -> list[PlainServer]:
    """The plain stores that a remote tier is compared with. ``names``: prefix of all keys."""
    entries, values, _ = sent.shape
    keys = [[f"{names}:{entry}:{value}" for value in range(values)] for entry in range(entries)]
    parsed = RemoteUrl.parse(url)
    if parsed.kind == "mooncake":
        return [Mooncake(sent, received, keys, parsed)]
    found: list[PlainServer] = [Wire(sent, received, keys, parsed)]
    if find_spec("redis") is not None:
        found.append(RedisPackage(sent, received, keys, parsed))
    return found
