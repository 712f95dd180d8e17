"""Fetches entries from slower tiers into the fastest one while other requests run. Requests take turns."""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvmosaic.core.key import ChunkKey
from kvmosaic.core.limits import shown_id
from kvmosaic.store import ChunkStorageManager, Fetched
from kvmosaic.store.streams import on_side_stream, record_event
from kvmosaic.store.tiers.host import taken_bytes

logger = logging.getLogger(__name__)

FETCHES_AT_ONCE = 4
"""Number of threads, so that one slow fetch does not hold up all others."""
TURN_TOKENS = 1024
"""Number of tokens after which a thread passes on to the next request. A tier can read many small entries together. A
turn is never shorter than one entry."""
MAX_WAITING_FETCHES = 256
"""Maximum number of fetches that wait for a thread. Further fetches end at once, without their entries."""
HELD_BYTES = 4 * 1024**3
"""Maximum bytes of entries that are kept alive for requests because the fastest tier has no room for them."""


class FetchEnd(NamedTuple):
    """The end of a request's fetch."""

    seconds: float
    not_brought: frozenset[bytes]
    """Content hashes of the entries that are not available to the request."""
    sources: Mapping[bytes, str]
    """Tiers that had the entries that it brought, by content hash."""


@dataclass(eq=False)
class _Fetch:
    keys: Sequence[ChunkKey]
    request_id: str | None
    """Request that waits for it, if any."""
    begin: float = field(default_factory=time.perf_counter)
    after: torch.cuda.Event | None = field(default_factory=record_event)
    """Event of the GPU that the fetch has to wait for."""
    pins: ExitStack = field(default_factory=ExitStack)
    entries: dict[ChunkKey, Fetched] = field(default_factory=dict)
    """Fetched entries for which the fastest tier had no room."""
    sources: dict[bytes, str] = field(default_factory=dict)
    """Tiers that had the fetched entries, by content hash."""
    is_released: bool = False
    """Whether it is no longer needed, or its entries must not be used."""
    asked_for: int = 0
    """Number of leading keys that tiers were asked for."""

    def take_turn(self) -> Sequence[ChunkKey]:
        """The keys of its next turn."""
        start, tokens = self.asked_for, 0
        while self.asked_for < len(self.keys):
            tokens += self.keys[self.asked_for].num_tokens
            if tokens > TURN_TOKENS and self.asked_for > start:
                break
            self.asked_for += 1
        return self.keys[start : self.asked_for]

    @property
    def is_over(self) -> bool:
        return self.is_released or self.asked_for == len(self.keys)


class ChunkFetcher:
    """A few threads that fetch entries. Requests take turns, so one with thousands of entries delays another by few
    of them. The entries of a request are available until it is released: pinned in the fastest tier, or held here."""

    def __init__(self, store: ChunkStorageManager) -> None:
        self._store = store
        self._fetches: dict[str, _Fetch] = {}
        """The latest fetch of each request."""
        self._finished: dict[str, FetchEnd] = {}
        self._waiting = 0
        self._errors = 0
        self._held_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()
        """Guards all of the above. No thread waits for anything else while it holds it."""
        self._threads = ThreadPoolExecutor(FETCHES_AT_ONCE, thread_name_prefix="kvmosaic-fetch")

    def start(self, request_id: str, keys: Sequence[ChunkKey]) -> None:
        """Fetch ``keys``; the request appears in :meth:`take_finished` when the fetch has ended, successfully or
        not."""
        self.release(request_id)
        fetch = _Fetch(keys, request_id)
        with self._lock:
            self._fetches[request_id] = fetch
        try:
            fetch.pins.enter_context(self._store.pin(keys))
            if self._submit(fetch):
                return
        except Exception:
            logger.exception("could not start to fetch chunks for request %s", shown_id(request_id))
            self._count_error()
        self._finish(fetch)

    def bring_up(self, keys: Sequence[ChunkKey]) -> None:
        """Fetch ``keys`` for later requests, unless too many fetches are waiting."""
        if keys:
            self._submit(_Fetch(keys, None))

    def kept_for(self, request_id: str) -> Mapping[ChunkKey, Fetched]:
        """Entries that were fetched for a request and are not in the fastest tier."""
        fetch = self._fetches.get(request_id)
        return {} if fetch is None else fetch.entries

    def release(self, request_id: str) -> None:
        """Release a request's fetched entries, which it no longer needs."""
        with self._lock:
            fetch = self._fetches.pop(request_id, None)
            if fetch is None:
                return
            self._drop(fetch)
            self._finished.pop(request_id, None)
        fetch.pins.close()

    def clear(self) -> None:
        """The store is emptied. Entries that were fetched, or are being read, are not used. The end of the fetches is
        still reported."""
        with self._lock:
            for fetch in self._fetches.values():
                self._drop(fetch)

    def forget(self, keys: Collection[ChunkKey]) -> None:
        """These entries are deleted. Requests that they were fetched for do without them."""
        with self._lock:
            for fetch in self._fetches.values():
                forgotten = [fetch.entries[key] for key in keys if key in fetch.entries]
                self._held_bytes -= sum(taken_bytes(each.entry.data) for each in forgotten)
                fetch.entries = {key: each for key, each in fetch.entries.items() if key not in keys}

    def _drop(self, fetch: _Fetch) -> None:
        """Drop a fetch's entries, and accept no more. The caller holds the lock."""
        fetch.is_released = True
        self._held_bytes -= sum(taken_bytes(each.entry.data) for each in fetch.entries.values())
        fetch.entries = {}

    def take_finished(self) -> dict[str, FetchEnd]:
        """The fetches that ended since the last call, by request."""
        if not self._finished:
            return {}
        with self._lock:
            finished, self._finished = self._finished, {}
        return finished

    def take_errors(self) -> int:
        """Number of fetches that failed since the last call."""
        with self._lock:
            errors, self._errors = self._errors, 0
        return errors

    def _count_error(self) -> None:
        with self._lock:
            self._errors += 1

    def close(self) -> None:
        """Wait for entries that are being read, and cancel all other fetches."""
        with self._lock:
            self._is_closed = True
            running = list(self._fetches)
        for request_id in running:
            self.release(request_id)
        self._threads.shutdown(cancel_futures=True)

    def _submit(self, fetch: _Fetch) -> bool:
        """Queue a fetch behind all others, for its next turn. Returns whether that was possible."""
        with self._lock:
            if self._is_closed or (fetch.asked_for == 0 and self._waiting >= MAX_WAITING_FETCHES):
                return False
            self._waiting += 1
            self._threads.submit(self._run, fetch)
        return True

    def _run(self, fetch: _Fetch) -> None:
        with self._lock:
            self._waiting -= 1
        try:
            if not fetch.is_released:
                with on_side_stream(fetch.after):
                    self._bring(fetch, fetch.take_turn())
            if not fetch.is_over and self._submit(fetch):
                return
        except Exception:
            logger.exception("could not fetch %d chunk(s); they are computed instead", len(fetch.keys))
            self._count_error()
        self._finish(fetch)

    def _bring(self, fetch: _Fetch, keys: Sequence[ChunkKey]) -> None:
        for each in self._store.fetch_each(keys):
            with self._lock:
                if fetch.is_released:
                    return
                fetch.sources[each.entry.key.content_hash] = each.tier
                has_room = self._held_bytes + taken_bytes(each.entry.data) <= HELD_BYTES
                if fetch.request_id is not None and not each.is_near and has_room:
                    fetch.entries[each.entry.key] = each
                    self._held_bytes += taken_bytes(each.entry.data)

    def _finish(self, fetch: _Fetch) -> None:
        missing = [key for key in fetch.keys if key not in fetch.entries and not self._store.is_near(key)]
        with self._lock:
            if fetch.request_id is not None and self._fetches.get(fetch.request_id) is fetch:
                seconds = time.perf_counter() - fetch.begin
                not_brought = frozenset(key.content_hash for key in missing)
                self._finished[fetch.request_id] = FetchEnd(seconds, not_brought, fetch.sources)
