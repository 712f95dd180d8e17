"""Entries in a store on another machine, shared by many engines."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.store.base import CorruptEntryError, EntryInfo, Tier, TierDownError
from kvmosaic.store.breaker import Breaker
from kvmosaic.store.codec import DecodedEntry, max_file_bytes
from kvmosaic.store.remote.base import ABSENT, FAILED, RefusedError, RemoteClient, Value
from kvmosaic.store.remote.heads import HeadGroups, join, values_of
from kvmosaic.store.remote.incoming import IncomingEntries, IncomingEntry
from kvmosaic.store.remote.keys import PREFIX, HeadPoolKey, names_of, parse_remote_key
from kvmosaic.store.remote.mooncake import MooncakeClient
from kvmosaic.store.remote.valkey import ValkeyClient
from kvmosaic.store.seal import ANY_ENTRY, EntryCheck

logger = logging.getLogger(__name__)

DELETED_AT_ONCE = 1000
MAX_SEEN = 2**20
"""Maximum number of names that a listing remembers, because a store may list a name twice."""
MAX_NAME = 2048
"""Maximum length of a listed name, in characters. Longer ones are not ours."""


class RemoteTier(Tier):
    """Values with the bytes that a file on disk would have: one value per entry, or one per head if the entry's key
    names heads and layers (``core/heads.py``). The remote store evicts by its own rules, so an entry is present only
    if all its values are.

    A damaged value is deleted, because there is no place to set it aside."""

    name = "remote"
    capacity = None
    is_far = True

    def __init__(
        self,
        client: RemoteClient,
        deadline_s: float,
        title: str,
        share: HeadShare | None = None,
        check: EntryCheck = ANY_ENTRY,
    ) -> None:
        """``deadline_s`` is the deadline of a call that moves no data, in seconds. ``title`` is the tier's name in
        messages. ``share`` is the part of the KV that this process holds, if heads are stored one by one. ``check``
        has the requirements for entries."""
        self._client = client
        self._check = check
        self._share = share
        self._formats: dict[tuple[str, str, str], KVFormat] = {}
        """Formats of the values read so far. They predict the size of the KV in the next ones."""
        self._breaker = Breaker(title, deadline_s, probe=lambda: client.exists([PREFIX]), harmless=(RefusedError,))

    @property
    def is_up(self) -> bool:  # type: ignore[override]
        return self._breaker.is_up

    def call_when_up(self, call: Callable[[], None]) -> None:
        self._breaker.when_up = call

    def check(self) -> None:
        self._breaker.call(lambda: self._client.exists([PREFIX]))

    def size(self, key: ChunkKey) -> int | None:
        names = names_of(key)
        sizes = [size for size in self._breaker.call(lambda: self._client.sizes(names)) if size is not None]
        return sum(sizes) if len(sizes) == len(names) else None

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        names = [names_of(key) for key in keys]
        every = list(chain.from_iterable(names))
        found = self._breaker.call(lambda: self._client.exists(every))
        if all(found):
            return [True] * len(keys)
        each = iter(found)
        return [all(list(islice(each, len(parts)))) for parts in names]

    def get(self, key: ChunkKey) -> ChunkKV | None:
        [(_, take)] = self.get_all([key])
        return take()

    def get_all(self, keys: Sequence[ChunkKey]) -> Iterator[tuple[ChunkKey, Callable[[], ChunkKV | None]]]:
        batch: list[IncomingEntry] = []
        for key in keys:
            entry = self._incoming(key)
            room = self._client.read_at_once_bytes - sum(each.expected_bytes for each in batch)
            if batch and not 0 < entry.expected_bytes <= room:
                yield from self._read_together(batch)
                batch, entry = [], self._incoming(key)  # its format may be known by now
            batch.append(entry)
        if batch:
            yield from self._read_together(batch)

    def _incoming(self, key: ChunkKey) -> IncomingEntry:
        return IncomingEntry(key, self._check, self._formats.get(_layout(key)))

    def _read_together(self, batch: list[IncomingEntry]) -> Iterator[tuple[ChunkKey, Callable[[], ChunkKV | None]]]:
        names = [name for entry in batch for name in names_of(entry.key)]
        every = IncomingEntries(batch)
        lengths: list[int] = []
        failure: Callable[[], OSError] | None = None
        try:
            lengths = self._breaker.call(lambda: self._client.get_into(names, every), every.nbytes)
        except (TierDownError, RefusedError) as error:
            # Not the error itself: its traceback would keep the memory of the whole batch.
            failure = partial(type(error), str(error))
        at = 0
        for entry in batch:
            own = slice(at, at + entry.num_values)
            yield entry.key, partial(self._taken, entry, names[own], lengths[own], failure)
            at += entry.num_values

    def _taken(
        self, incoming: IncomingEntry, names: list[str], lengths: list[int], failure: Callable[[], OSError] | None
    ) -> ChunkKV | None:
        """The entry that was received; ``None`` if it is absent."""
        if failure is not None:
            raise failure()
        key = incoming.key
        parts = [part for _, part in sorted(incoming.parts.items()) if isinstance(part, DecodedEntry)]
        damage = {names[index]: part for index, part in incoming.parts.items() if not isinstance(part, DecodedEntry)}
        if parts:
            self._formats[_layout(key)] = parts[0].format
        if len(parts) == len(names):
            try:
                return join(key, parts, incoming.block)
            except CorruptEntryError as error:
                damage = dict.fromkeys(names, error)
        if damage:
            self.set_aside += 1
            for name, reason in damage.items():
                logger.warning("deleted a damaged value from the remote tier: %s (%s)", name, reason)
            self._breaker.call(lambda: self._client.delete(list(damage)))
            raise next(iter(damage.values()))
        if ABSENT in lengths:
            return None
        raise RefusedError(f"the value of {names[lengths.index(FAILED)]} is there but cannot be read")

    def nbytes(self, entry: ChunkKV) -> int:
        return entry.nbytes + len(names_of(entry.key)) * (max_file_bytes(entry) - entry.nbytes)

    def put(self, entry: ChunkKV) -> int:
        if self._share is not None and not self._share.writes(entry.key.content_hash):
            return self.nbytes(entry)  # another rank with the same heads has the same entry, and sends it
        # A copy from a GPU has to be made in this thread, on its stream. The rest is done while values are sent.
        names, make = names_of(entry.key), values_of(replace(entry, data=entry.data.cpu()), self._check.seal)
        sizes = [self.nbytes(entry) // len(names)] * len(names)
        most = self._client.max_value_bytes
        if most is not None and sizes[0] > most:
            raise RefusedError(f"a value of up to {sizes[0]} bytes exceeds the store's limit of {most}")

        def value(index: int) -> Value:
            made = make[index]()
            sizes[index] = sum(part.nbytes for part in made)
            return made

        values = [partial(value, index) for index in range(len(names))]
        refusals = self._breaker.call(lambda: self._client.put(names, values), lambda: sum(sizes))
        refused = [refusal for refusal in refusals if refusal is not None]
        if refused:
            # An incomplete set of heads is useless, and a full store needs the room.
            stored = [name for name, refusal in zip(names, refusals, strict=True) if refusal is None]
            if stored:
                self._breaker.call(lambda: self._client.delete(stored))
            raise RefusedError(refused[0])
        return sum(sizes)

    def delete(self, key: ChunkKey) -> None:
        self.delete_all([key])

    def delete_all(self, keys: Iterable[ChunkKey]) -> None:
        names = [name for key in keys for name in names_of(key)]
        failure: OSError | None = None
        for start in range(0, len(names), DELETED_AT_ONCE):
            page = names[start : start + DELETED_AT_ONCE]
            try:
                self._breaker.call(partial(self._client.delete, page))
            except OSError as error:
                failure = failure or error
            self.progress += 1
        if failure is not None:
            raise failure

    def scan(self) -> Iterator[EntryInfo]:
        """In no particular order: the store does not tell which entries are older. Heads that are stored one by one
        are listed as the entries that this process would look up, the others as runs. Of more than :data:`MAX_SEEN`
        names, some may be listed twice, or as more runs than necessary."""
        pages = self._client.scan(PREFIX)
        seen: set[str] = set()
        heads = HeadGroups()
        while (page := self._breaker.call(lambda: next(pages, None))) is not None:
            self.progress += 1
            names = [name for name in page if name not in seen and len(name) <= MAX_NAME]
            if len(seen) + len(names) > MAX_SEEN:
                yield from self._infos(heads)
                seen, heads = set(), HeadGroups()
            seen.update(names)
            sizes = self._breaker.call(partial(self._client.sizes, names))
            for name, size in zip(names, sizes, strict=True):
                key = _parsed(name)
                if isinstance(key, HeadPoolKey) and size is not None:
                    heads.add(key, size)
                elif isinstance(key, ChunkKey) and size is not None:
                    yield EntryInfo(key, size, self.name, pinned=False)
        yield from self._infos(heads)

    def _infos(self, heads: HeadGroups) -> Iterator[EntryInfo]:
        for key, size in heads.entries(self._share):
            yield EntryInfo(key, size, self.name, pinned=False)

    def close(self) -> None:
        self._breaker.close()
        self._client.close()


def open_remote_tier(
    url: str, deadline_s: float, share: HeadShare | None = None, check: EntryCheck = ANY_ENTRY
) -> RemoteTier:
    """The tier at ``url``, which is not contacted yet. ``share`` is the part of a model's KV that this process holds,
    if heads are stored one by one. ``check`` has the requirements for entries."""
    parsed = RemoteUrl.parse(url)
    client = (MooncakeClient if parsed.kind == "mooncake" else ValkeyClient)(parsed, deadline_s)
    return RemoteTier(client, deadline_s, f"the remote tier at {url}", share, check)


def _layout(key: ChunkKey) -> tuple[str, str, str]:
    """The parts of a key that entries of one format share."""
    return key.model, key.fingerprint, key.heads


def _parsed(name: str) -> ChunkKey | HeadPoolKey | None:
    try:
        return parse_remote_key(name)
    except ValueError:  # of another program or a later version
        return None
