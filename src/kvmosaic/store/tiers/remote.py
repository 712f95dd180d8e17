"""Entries in a store on another machine, shared by many engines."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.store.base import CorruptEntryError, EntryInfo, Tier
from kvmosaic.store.codec import decode, encode, max_file_bytes
from kvmosaic.store.remote.base import ABSENT, FAILED, Bytes, RefusedError, RemoteClient
from kvmosaic.store.remote.breaker import Breaker
from kvmosaic.store.remote.keys import PREFIX, parse_remote_key, remote_key
from kvmosaic.store.remote.mooncake import MooncakeClient
from kvmosaic.store.remote.valkey import ValkeyClient

logger = logging.getLogger(__name__)

DELETED_AT_ONCE = 1000


class RemoteTier(Tier):
    """One value per entry, the bytes that a file on disk would have. The store evicts by rules of its own.

    There is nowhere to set a damaged value aside: it is deleted."""

    name = "remote"
    capacity = None
    is_far = True

    def __init__(self, client: RemoteClient, deadline_s: float, title: str) -> None:
        """``deadline_s`` is how long a call may take that moves no data, in seconds; ``title`` is for messages."""
        self._client = client
        self._breaker = Breaker(title, deadline_s, probe=lambda: client.exists([PREFIX]))

    def size(self, key: ChunkKey) -> int | None:
        return self._breaker.call(lambda: self._client.sizes([remote_key(key)]))[0]

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        names = list(map(remote_key, keys))
        return self._breaker.call(lambda: self._client.exists(names))

    def get(self, key: ChunkKey) -> ChunkKV | None:
        name = remote_key(key)
        values: list[Bytes] = []

        def buffer_for(_: int, nbytes: int) -> Bytes:
            values.append(np.empty(nbytes, np.uint8))
            return values[-1]

        [length] = self._breaker.call(
            lambda: self._client.get_into([name], buffer_for), lambda: sum(value.nbytes for value in values)
        )
        if length == ABSENT:
            return None
        if length == FAILED:
            raise RefusedError(f"the value of {name} is there but cannot be read")
        try:
            return decode(values[-1], key)
        except CorruptEntryError as error:
            self.set_aside += 1
            logger.warning("deleted a damaged entry from the remote tier: %s (%s)", name, error)
            self.delete_all([key])
            raise

    def nbytes(self, entry: ChunkKV) -> int:
        return max_file_bytes(entry)

    def put(self, entry: ChunkKV) -> int:
        name, value = remote_key(entry.key), encode(entry)
        size = sum(part.nbytes for part in value)
        most = self._client.max_value_bytes
        if most is not None and size > most:
            raise RefusedError(f"an entry of {size} bytes, and the store takes no more than {most}")
        [refusal] = self._breaker.call(lambda: self._client.put([name], [value]), lambda: size)
        if refusal is not None:
            raise RefusedError(refusal)
        return size

    def delete(self, key: ChunkKey) -> None:
        self.delete_all([key])

    def delete_all(self, keys: Iterable[ChunkKey]) -> None:
        names = list(map(remote_key, keys))
        for start in range(0, len(names), DELETED_AT_ONCE):
            page = names[start : start + DELETED_AT_ONCE]
            self._breaker.call(partial(self._client.delete, page))

    def scan(self) -> Iterator[EntryInfo]:
        """In no particular order: the store does not tell what is older."""
        pages = self._client.scan(PREFIX)
        seen: set[str] = set()
        while (page := self._breaker.call(lambda: next(pages, None))) is not None:
            names = [name for name in page if name not in seen]
            seen.update(names)
            sizes = self._breaker.call(partial(self._client.sizes, names))
            for name, size in zip(names, sizes, strict=True):
                key = _parsed(name)
                if key is not None and size is not None:
                    yield EntryInfo(key, size, self.name, pinned=False)

    def close(self) -> None:
        self._breaker.close()
        self._client.close()


def open_remote_tier(url: str, deadline_s: float) -> RemoteTier:
    """The tier at ``url``, which is not contacted yet."""
    parsed = RemoteUrl.parse(url)
    client = (MooncakeClient if parsed.kind == "mooncake" else ValkeyClient)(parsed, deadline_s)
    return RemoteTier(client, deadline_s, f"the remote tier at {url}")


def _parsed(name: str) -> ChunkKey | None:
    try:
        return parse_remote_key(name)
    except ValueError:  # somebody else's, or of a version to come
        return None
