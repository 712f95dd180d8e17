"""Values in a Mooncake store: a master that knows where they are, and holders that lend their memory."""

import atexit
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException
from itertools import chain
from typing import Any

import numpy as np

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.store.memory import Bytes
from kvmosaic.store.remote.base import ABSENT, FAILED, Incoming, RemoteClient, Value
from kvmosaic.store.remote.keys import group_of
from kvmosaic.store.threads import Threads

LOCAL_BUFFER_BYTES = 16 * 2**20
"""Size of the buffer for the library's own copies, which we do not use."""
LONGEST_CALL_S = 15.0
"""Timeout of calls in seconds: three times what the library may take to give up."""
NO_ROOM = -200
NOT_FOUND = -704
RPC_FAILED = -900
PAGE_KEYS = 1000
LOOKUP_KEYS = 1024
"""Maximum keys of one lookup. More keys are looked up by several concurrent calls."""


class MooncakeClient(RemoteClient):
    """A client that lends no memory of its own: entries outlive the engines that wrote them, in the holders.

    Rules of the library that matter here: a put of an existing key succeeds and changes nothing; a success is no
    guarantee, as the value may be evicted at once; a get may fail after a positive lookup, when a holder died.
    """

    read_at_once_bytes = 64 * 2**20
    """Each call costs milliseconds besides its data. Larger calls would wait longer when a holder dies."""

    def __init__(self, url: RemoteUrl, patience_s: float) -> None:
        """Connects on first use. ``patience_s`` is the timeout for connecting and for listing keys, in seconds. The
        library decides when all other calls return, after 5 s at most."""
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # otherwise it writes a page to stderr at start
        try:
            from mooncake import store  # a large library that few need
        except ImportError as error:
            raise ConfigError(
                f"remote=mooncake://…: cannot load the library ({error}); in kvmosaic's folder, pip install -e "
                "'.[mooncake]', which on Linux also needs the package libibverbs1"
            ) from None
        self._library: Any = store
        self._url = url
        self._patience_s = patience_s
        self._connected: Any = None
        self._calls = 0
        """Number of calls in progress, including abandoned ones."""
        self._changed = threading.Condition()
        self._threads = Threads()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        # The master processes each call in one thread, but several calls at once.
        pages = [keys[start : start + LOOKUP_KEYS] for start in range(0, len(keys), LOOKUP_KEYS)]
        calls = [self._threads.start(partial(self._exists, page)) for page in pages[1:]]
        found = self._exists(pages[0]) if pages else []
        for call in calls:
            if not call.wait(LONGEST_CALL_S):
                raise ConnectionError("the Mooncake master does not answer")
            found += call.result()
        return found

    def _exists(self, keys: Sequence[str]) -> list[bool]:
        with self._store() as store:
            codes = store.batch_is_exist(list(keys))
        _check(codes)
        return [code == 1 for code in codes]

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        # For an absent key, the library would write an error to stderr.
        there = [key for key, found in zip(keys, self.exists(keys), strict=True) if found]
        with self._store() as store:
            replicas = store.batch_get_replica_desc(there) if there else {}
        sizes = {key: max(map(_size, found), default=0) for key, found in replicas.items()}
        return [sizes.get(key) or None for key in keys]

    def put(self, keys: Sequence[str], values: Sequence[Callable[[], Value]]) -> list[str | None]:
        made = self._threads.map(values)
        parts = [[np.frombuffer(part, np.uint8) for part in value] for value in made]
        config = self._library.ReplicateConfig()
        config.group_ids = [group_of(key) for key in keys]
        with self._store() as store, _Registered(store, list(chain.from_iterable(parts))):
            codes = store.batch_put_from_multi_buffers(list(keys), *_places(parts), config)
        _check(codes)
        return [None if code >= 0 else _refusal(code) for code in codes]

    def get_into(self, keys: Sequence[str], incoming: Incoming) -> list[int]:
        lengths = [ABSENT] * len(keys)
        there = [(index, size) for index, size in enumerate(self.sizes(keys)) if size is not None]
        wanted = [(index, size, incoming.buffers_for(index, size)) for index, size in there]
        for index, size, none in wanted:
            lengths[index] = size if none is None else ABSENT
        there = [(index, size) for index, size, memory in wanted if memory is not None]
        buffers = [memory for _, _, memory in wanted if memory is not None]
        with self._store() as store, _Registered(store, list(chain.from_iterable(buffers))):
            codes = store.batch_get_into_multi_buffers([keys[index] for index, _ in there], *_places(buffers))
        _check(codes)
        for (index, size), code in zip(there, codes, strict=True):
            lengths[index] = size if code == size else ABSENT if code == NOT_FOUND else FAILED
        self._threads.map([partial(incoming.received, index) for index, _ in there if lengths[index] > 0])
        return lengths

    def delete(self, keys: Sequence[str]) -> None:
        # By force: otherwise, keys that were read or looked up in the last seconds are protected.
        with self._store() as store:
            codes = store.batch_remove(list(keys), True)
        _check(codes)

    def scan(self, prefix: str) -> Iterator[list[str]]:
        every = _ask_master(self._url, "get_all_keys", self._patience_s).splitlines()
        names = [name for name in every if name.startswith(prefix)]
        for start in range(0, len(names), PAGE_KEYS):
            yield names[start : start + PAGE_KEYS]

    def close(self) -> None:
        self._threads.close()
        with self._changed:
            # Closing it during a call would crash the process. If a call never ends, it stays open.
            if self._connected is None or not self._changed.wait_for(lambda: self._calls == 0, LONGEST_CALL_S):
                return
            self._connected.close()
            self._connected = None
        atexit.unregister(self.close)

    @contextmanager
    def _store(self) -> Iterator[Any]:
        """The library's client, which is not closed inside the block."""
        with self._changed:
            store = self._connect()
            self._calls += 1
        try:
            yield store
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _connect(self) -> Any:
        if self._connected is None:
            store = connect(self._library, self._url, self._patience_s)
            self._connected = store
            # A client that is destroyed without being closed, at exit or before, crashes the whole process.
            atexit.register(self.close)
        return self._connected


def connect(library: Any, url: RemoteUrl, patience_s: float) -> Any:
    """A client of the library that lends no memory; raises ``ConnectionError``."""
    # If no master answers, the library's setup would stop every thread of this process for 90 s.
    _ask_master(url, "health", patience_s)
    socket.create_connection((url.host, url.port), patience_s).close()
    store, master = library.MooncakeDistributedStore(), f"{url.host}:{url.port}"
    code = store.setup(_own_address(url), "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code != 0:
        raise ConnectionError(f"no Mooncake master at {master} (error {code})")
    return store


class _Registered:
    """Registers memory with the library while it is in use."""

    def __init__(self, store: Any, buffers: Sequence[Bytes]) -> None:
        self._store = store
        self._ranges: list[tuple[int, int]] = []
        """Start and end addresses. The heads of an entry are adjacent, and so one range."""
        for start, end in sorted((buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes) for buffer in buffers):
            if self._ranges and self._ranges[-1][1] == start:
                start = self._ranges.pop()[0]
            self._ranges.append((start, end))

    def __enter__(self) -> None:
        for start, end in self._ranges:
            self._store.register_buffer(start, end - start)

    def __exit__(self, *_: object) -> None:
        for start, _end in self._ranges:
            self._store.unregister_buffer(start)


def _ask_master(url: RemoteUrl, what: str, patience_s: float) -> str:
    address = f"http://{url.host}:{url.metrics_port}/{what}"
    try:
        with urllib.request.urlopen(address, timeout=patience_s) as answer:
            text: str = answer.read().decode(errors="replace")
            return text
    except (OSError, HTTPException) as error:
        raise ConnectionError(f"{address}: {error}; is metrics_port right?") from error


def _places(values: Sequence[Sequence[Bytes]]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and lengths of the parts of each value."""
    addresses = [[part.ctypes.data for part in value] for value in values]
    return addresses, [[part.nbytes for part in value] for value in values]


def _check(codes: Sequence[int]) -> None:
    """Raise an error if the master is dead. The library reports that as an error of every single key."""
    if RPC_FAILED in codes:
        raise ConnectionError("the Mooncake master does not answer")


def _refusal(code: int) -> str:
    why = "no holder has room for the value, or there is no holder" if code == NO_ROOM else "see its error codes"
    return f"Mooncake's error {code}: {why}"


def _size(replica: Any) -> int:
    if replica.is_memory_replica():
        return int(replica.get_memory_descriptor().buffer_descriptor.size)
    return int(replica.get_disk_descriptor().object_size) if replica.is_disk_replica() else 0


def _own_address(url: RemoteUrl) -> str:
    """This machine's address as the master sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.host, url.port))
        return str(probe.getsockname()[0])
