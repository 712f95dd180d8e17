"""Speed of every tier, opened as engines open it, compared with plain use of its backend, in turns in one run."""

import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvmosaic.bench.plain_stores import Files, Memory, PlainServer, PlainStore, plain_stores
from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.key import ChunkKey, content_hash, format_fingerprint
from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.store import ChunkStorageManager, open_store
from kvmosaic.store.remote.keys import names_of

REPEATS = 15
LOOKUP_KEYS = 2048
DEADLINE_MS = 10_000
"""Deadline of the remote tier. Longer than an engine's, because a benchmark should not fail on a busy machine."""


class Shape(NamedTuple):
    """Shape of the entries that are moved. Numbers are bf16."""

    entries: int
    tokens: int
    layers: int
    heads: int
    head_dim: int

    @property
    def head_bytes(self) -> int:
        return 2 * 2 * self.tokens * self.layers * self.head_dim

    @property
    def nbytes(self) -> int:
        return self.entries * self.heads * self.head_bytes


class Bench:
    """Measures tiers with the same entries, which belong to a tenant with a unique name."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.tenant = f"bench-{uuid.uuid4().hex[:12]}"
        self.share = HeadShare.of_rank(0, 1, shape.heads, shape.layers)
        size = shape.entries, shape.heads, shape.head_bytes
        self.sent = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self.received = np.ones(size, np.uint8)  # not np.empty, so that every page is mapped
        # As engines stage them: head by head, each entry in separate memory.
        data = map(torch.clone, torch.from_numpy(self.sent))
        self.entries = [self._entry(number, shape, each) for number, each in enumerate(data)]
        self.keys = [entry.key for entry in self.entries]

    def open(self, **settings: Any) -> ChunkStorageManager:
        """A store with host memory for all entries."""
        chosen = {"disk_path": None, "remote": None, "tenant_quota": None, "tenant": self.tenant} | settings
        memory = 2 * self.shape.nbytes
        config = load_config(per_head_storage=True, remote_deadline_ms=DEADLINE_MS, host_memory=memory, **chosen)
        return open_store(config, share=self.share)

    def clear(self, *stores: ChunkStorageManager) -> None:
        for store in stores:
            store.clear(lambda key: key.tenant == self.tenant)
            store.flush()

    def host(self) -> list[dict[str, Any]]:
        """Rows of the host tier. It returns entries without a copy, so ``get`` copies them, as the plain store
        does."""
        parts_of_more = [
            replace(entry, data=data.view(torch.bfloat16))
            for entry, data in zip(self.entries, torch.from_numpy(self.sent), strict=True)
        ]

        def put() -> None:
            for entry in parts_of_more:
                self._put(store, entry)

        def get() -> None:
            for target, entry in zip(self.received, self._find(store, "host"), strict=True):
                np.copyto(target, entry.data.view(torch.uint8).numpy())

        with closing(self.open()) as store:
            plain = Memory(self.sent, self.received)
            return self._rows("host", [plain], put, get, lambda: self.clear(store))

    def disk(self, folder: Path) -> list[dict[str, Any]]:
        plain = Files(self.sent, self.received, folder)
        settings = {"disk_path": folder / "entries", "disk_space": 2 * self.shape.nbytes + 2**20}
        with closing(self.open(**settings)) as writer, closing(self.open(**settings)) as reader:
            return self._between("disk", "disk", writer, reader, [plain])

    def remote(self, url: str) -> list[dict[str, Any]]:
        kind = RemoteUrl.parse(url).kind
        with closing(self.open(remote=url)) as writer, closing(self.open(remote=url)) as reader:
            plain = plain_stores(url, self.sent, self.received, self.tenant)
            try:
                rows = self._between(kind, "remote", writer, reader, plain)
                return [*rows, *(self._lookup(kind, writer, reader, peer) for peer in plain)]
            finally:
                for peer in plain:
                    peer.close()

    def _between(
        self,
        title: str,
        tier: str,
        writer: ChunkStorageManager,
        reader: ChunkStorageManager,
        plain: Sequence[PlainStore],
    ) -> list[dict[str, Any]]:
        """Rows of a tier that one engine writes entries to, and from which another fetches them into its memory."""

        def put() -> None:
            for entry in self.entries:
                self._put(writer, entry)
            writer.flush()
            if writer.event_counts()["write_errors"]:
                raise KvmosaicError("the store did not take an entry; the log says why")

        def get() -> None:
            reader.fetch(self.keys)
            self._find(reader, tier)

        return self._rows(title, plain, put, get, lambda: self.clear(writer, reader))

    def _rows(
        self,
        tier: str,
        plain: Sequence[PlainStore],
        put: Callable[[], object],
        get: Callable[[], object],
        clean: Callable[[], object],
    ) -> list[dict[str, Any]]:
        """Rows that compare our ``put`` and ``get`` with those of ``plain``, in turns."""
        times: dict[tuple[str, str], list[float]] = {}
        sides: list[tuple[str, Callable[[], object], Callable[[], object], Callable[[], object]]] = [
            ("ours", put, get, clean),
            *((peer.title, peer.put, peer.get, peer.clean) for peer in plain),
        ]
        for turn in range(REPEATS + 1):
            # The order alternates, because each side inherits caches and the store's free memory from the one before.
            for name, put_all, get_all, remove_all in sides[:: 1 if turn % 2 else -1]:
                try:
                    seconds = _seconds(put_all), _seconds(get_all)
                finally:
                    remove_all()
                if turn > 0:  # the first turn connects, and touches memory for the first time
                    for operation, taken in zip(("put", "get"), seconds, strict=True):
                        times.setdefault((name, operation), []).append(taken)
        speed = {what: self.shape.nbytes / 1e6 / statistics.median(taken) for what, taken in times.items()}
        return [
            {
                "tier": tier,
                "operation": operation,
                "plain": peer.title,
                "ours_mb_per_s": speed["ours", operation],
                "plain_mb_per_s": speed[peer.title, operation],
                "ratio": _ratio(times["ours", operation], times[peer.title, operation]),
            }
            for peer in plain
            for operation in ("put", "get")
        ]

    @staticmethod
    def _put(store: ChunkStorageManager, entry: ChunkKV) -> None:
        if not store.put(entry):
            raise KvmosaicError("the store did not take an entry; the log says why")

    def _find(self, store: ChunkStorageManager, tier: str) -> list[ChunkKV]:
        """All entries. Each has to be found in ``tier``."""
        found = []
        for entry in self.entries:
            result = store.lookup(entry.key, entry.tokens, entry.context)
            if result.entry is None or result.tier != tier:
                raise KvmosaicError(f"an entry that was just stored is not found ({result.reason})")
            found.append(result.entry)
        return found

    def _lookup(
        self, tier: str, writer: ChunkStorageManager, reader: ChunkStorageManager, peer: PlainServer
    ) -> dict[str, Any]:
        """Row with the milliseconds to look up many heads at once, all of which are stored."""
        small = Shape(-(-LOOKUP_KEYS // self.shape.heads), 1, self.shape.layers, self.shape.heads, 1)
        nothing = torch.zeros(small.heads, small.head_bytes, dtype=torch.uint8)
        entries = [self._entry(number, small, nothing) for number in range(small.entries)]
        keys = [entry.key for entry in entries]
        names = [name for key in keys for name in names_of(key)]
        try:
            for entry in entries:
                self._put(writer, entry)
            writer.flush()
            absent = reader.absent(keys)
            if absent or peer.exists(names) != len(names):
                raise KvmosaicError(f"{len(absent)} of {len(keys)} entries that were just stored are not found")
            turns = [
                (_seconds(lambda: reader.absent(keys)), _seconds(lambda: peer.exists(names))) for _ in range(REPEATS)
            ]
        finally:
            self.clear(writer)
        ours, plain = zip(*turns, strict=True)
        return {
            "lookup": tier,
            "keys": len(names),
            "plain": peer.title,
            "ours_ms": 1e3 * statistics.median(ours),
            "plain_ms": 1e3 * statistics.median(plain),
            "ratio": _ratio(ours, plain),
        }

    def _entry(self, number: int, shape: Shape, data: torch.Tensor) -> ChunkKV:
        """Entry ``number``; ``data`` is ``[heads, bytes]``."""
        tokens = tuple(range(number * shape.tokens, (number + 1) * shape.tokens))
        fingerprint = format_fingerprint(shape=shape)
        heads = str(self.share.heads)
        key = ChunkKey(content_hash(tokens), shape.tokens, "bench-model", fingerprint, self.tenant, heads)
        kv_format = KVFormat(shape.layers, shape.heads, shape.head_dim, shape.head_dim, torch.bfloat16)
        return ChunkKV(key, tokens, (), kv_format, data.view(torch.bfloat16))


def run(shape: Shape, remote: str | None, disk_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Rows of MB/s (10⁶ bytes of KV), ours and plain, by tier and operation, and rows of lookup times. All values are
    medians. The ratio is the median over turns of the ratio in each turn, because a disturbance slows both sides of a
    turn. ``disk_path``: a folder on the disk to measure; temporary files in it are removed."""
    bench = Bench(shape)
    progress("host memory")
    rows = bench.host()
    if disk_path is not None:
        disk_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvmosaic-bench-", dir=disk_path) as folder:
        progress("disk")
        rows += bench.disk(Path(folder))
    if remote is not None:
        progress("the remote store")
        rows += bench.remote(remote)
    return {"rows": rows}


def _ratio(ours: Sequence[float], plain: Sequence[float]) -> float:
    """Our speed as a share of the plain speed, from the times of each turn."""
    return statistics.median(theirs / mine for mine, theirs in zip(ours, plain, strict=True))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
