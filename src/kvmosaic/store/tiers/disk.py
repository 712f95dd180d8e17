"""Entries as files, in a directory that several processes may share."""

import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import xxhash

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import KEY_PART
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError, EntryInfo, Tier
from kvmosaic.store.codec import max_file_bytes, read_entry, read_key, write_entry

logger = logging.getLogger(__name__)

SET_ASIDE = "set-aside"
INCOMING = "incoming"
SUFFIX = ".safetensors"
STALE_SECONDS = 3600
_MAX_NAME = 100
_ENTRY_NAME = re.compile(rf"[0-9a-f]{{32}}-\d+-({KEY_PART.pattern})\.safetensors")


def entry_path(key: ChunkKey) -> Path:
    """Where the entry of ``key`` is, below the root: ``tenant/model/fingerprint/hash-tokens-heads.safetensors``."""
    folders = map(folder_name, (key.tenant, key.model, key.fingerprint))
    return Path(*folders, f"{key.content_hash.hex()}-{key.num_tokens}-{key.heads}{SUFFIX}")


def folder_name(text: str) -> str:
    """A folder name, different for different texts and never one that means something else."""
    name = quote(text, safe="")
    if len(name) > _MAX_NAME:
        return f"{name[:_MAX_NAME]}%{xxhash.xxh3_128_hexdigest(text.encode())}"
    if name in ("", ".", "..", SET_ASIDE, INCOMING):
        return f"%{name}"  # quoting never yields "%" followed by one of these
    return name


class DiskTier(Tier):
    """One safetensors file per entry, found by its key alone: there is no index to keep in step.

    A file appears complete or not at all. Power loss may still leave a damaged one, as nothing waits for
    the disk; its checksums will tell. The byte budget covers the files this process wrote or met, or, if a
    ``tenant`` is given, all of that tenant's: then others' files are not even looked at, so they are never evicted.
    """

    name = "disk"

    def __init__(self, root: Path, capacity: int, tenant: str | None = None) -> None:
        self.capacity = capacity
        self.shares_budget = tenant is not None
        self.set_aside = 0
        self._root = root
        self._tenants = "*" if tenant is None else folder_name(tenant)
        root.mkdir(parents=True, exist_ok=True)
        os.listdir(root)  # a directory that cannot be read should be known now
        self._remove_stale_temporary_files()

    def size(self, key: ChunkKey) -> int | None:
        try:
            return (self._root / entry_path(key)).stat().st_size
        except FileNotFoundError:
            return None

    def get(self, key: ChunkKey) -> ChunkKV | None:
        path = self._root / entry_path(key)
        try:
            return read_entry(path, key)
        except FileNotFoundError:
            return None
        except CorruptEntryError as error:
            self._set_aside(path, error)
            raise

    def nbytes(self, entry: ChunkKV) -> int:
        return max_file_bytes(entry)

    def put(self, entry: ChunkKV) -> int:
        path = self._root / entry_path(entry.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # In a folder of our own on the same filesystem, so that cleaning up can never touch anybody's files.
        temporary = self._root / INCOMING / uuid.uuid4().hex
        temporary.parent.mkdir(exist_ok=True)
        try:
            write_entry(temporary, entry)
            size = temporary.stat().st_size
            # The library makes files for this user alone; whoever may read the folder may read its entries.
            temporary.chmod(path.parent.stat().st_mode & 0o666)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        # Not only at start: an engine runs for months, and others may die beside it.
        self._remove_stale_temporary_files()
        return size

    def delete(self, key: ChunkKey) -> None:
        (self._root / entry_path(key)).unlink(missing_ok=True)

    def scan(self) -> Iterator[EntryInfo]:
        """Reads headers only. Looks only at files named like ours, so that a directory with somebody's
        other safetensors files keeps them."""
        found = []
        for path in self._root.glob(f"{self._tenants}/*/*/*{SUFFIX}"):
            if _ENTRY_NAME.fullmatch(path.name) and path.relative_to(self._root).parts[0] != SET_ASIDE:
                with suppress(OSError):  # another process may remove it at any time
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
                        found.append((status.st_mtime_ns, status.st_size, path))
        for _, size, path in sorted(found):
            key = self._key_of(path)
            if key is not None:
                yield EntryInfo(key, size, self.name, pinned=False)

    def _key_of(self, path: Path) -> ChunkKey | None:
        try:
            key = read_key(path)
            if self._root / entry_path(key) != path:
                raise CorruptEntryError(f"holds the entry of another key, {key}")
            return key
        except CorruptEntryError as error:
            self._set_aside(path, error)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("cannot read %s (%s); check its permissions", path, error)
        return None

    def remove_set_aside(self) -> None:
        """Delete the damaged files that were kept for a look."""
        shutil.rmtree(self._root / SET_ASIDE, ignore_errors=True)

    def _set_aside(self, path: Path, reason: Exception) -> None:
        """Move a file away, so that it is neither met again nor lost."""
        target = self._root / SET_ASIDE / path.relative_to(self._root)
        target = target.with_name(f"{target.name}.{time.time_ns()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, target)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            logger.warning("%s is damaged (%s) and cannot be moved (%s); please remove it", path, reason, error)
            return
        self.set_aside += 1
        logger.warning("set a damaged entry aside: %s (%s)", target, reason)

    def _remove_stale_temporary_files(self) -> None:
        """Those of writers that died; a living one takes seconds."""
        for path in (self._root / INCOMING).glob("*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
