"""Brings entries from slower tiers to the fastest one while other requests run."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from kvmosaic.core.key import ChunkKey
from kvmosaic.store import ChunkStorageManager
from kvmosaic.store.streams import on_side_stream, record_event

logger = logging.getLogger(__name__)


class ChunkFetcher:
    """One thread that fetches. What was fetched for a request stays pinned until it is released."""

    def __init__(self, store: ChunkStorageManager) -> None:
        self._store = store
        self._held: dict[str, ExitStack] = {}
        self._finished: dict[str, float] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvmosaic-fetch")

    def start(self, request_id: str, keys: Sequence[ChunkKey]) -> None:
        """Fetch ``keys``; the request appears in :meth:`take_finished` when that is over, well or badly."""
        self.release(request_id)
        pins = self._held[request_id] = ExitStack()
        pins.enter_context(self._store.pin(keys))
        after, begin = record_event(), time.perf_counter()

        def fetch() -> None:
            try:
                with on_side_stream(after):
                    self._store.fetch(keys)
            except Exception:
                logger.exception(
                    "could not fetch chunks for request %s; they are looked up where they are", request_id
                )
            finally:
                with self._lock:
                    self._finished[request_id] = time.perf_counter() - begin

        self._thread.submit(fetch)

    def release(self, request_id: str) -> None:
        """The request no longer needs what was fetched for it, or never did."""
        pins = self._held.pop(request_id, None)
        if pins is not None:
            pins.close()

    def take_finished(self) -> dict[str, float]:
        """Requests whose fetch ended since the last call, and how many seconds they waited for it."""
        if not self._finished:
            return {}
        with self._lock:
            finished, self._finished = self._finished, {}
        return finished

    def close(self) -> None:
        """Wait for the fetch in progress; drop the others."""
        self._thread.shutdown(cancel_futures=True)
