"""Entries as files, in a directory that several processes may share."""

import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import xxhash

from kvmosaic.core.entry import ChunkKV, EntryKind
from kvmosaic.core.heads import KEY_PART
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError, EntryInfo, Tier
from kvmosaic.store.codec import max_file_bytes
from kvmosaic.store.files import FOLDER_MODE, make_folder, read_entry, read_key, write_entry
from kvmosaic.store.seal import ANY_ENTRY, EntryCheck

logger = logging.getLogger(__name__)

SET_ASIDE = "set-aside"
INCOMING = "incoming"
SUFFIX = ".safetensors"
STALE_SECONDS = 3600
CLEANING_SECONDS = 1.0
"""Minimum time between two looks for files that dead writers left."""
_MAX_NAME = 100
_ENTRY_NAME = re.compile(rf"[0-9a-f]{{32}}-\d+-({KEY_PART.pattern})\.safetensors", re.ASCII)


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

    def __init__(self, root: Path, capacity: int, tenant: str | None = None, check: EntryCheck = ANY_ENTRY) -> None:
        """``check`` is what entries have to be."""
        self.capacity = capacity
        self._check = check
        self.shares_budget = tenant is not None
        self.set_aside = 0
        self._root = root
        self._tenant = None if tenant is None else folder_name(tenant)
        self._next_cleaning = 0.0
        root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            root.mkdir(mode=FOLDER_MODE)  # one that was there keeps its permissions, of which `doctor` warns
        self.check()
        self._remove_stale_temporary_files()

    def check(self) -> None:
        os.listdir(self._root)  # a directory that cannot be read should be known now

    def size(self, key: ChunkKey) -> int | None:
        try:
            status = os.lstat(self._root / entry_path(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None  # what else is there, a put replaces

    def get(self, key: ChunkKey) -> ChunkKV | None:
        path = self._root / entry_path(key)
        try:
            return read_entry(path, key, self._check)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CorruptEntryError as error:
            self._set_aside(path, error)
            raise

    def nbytes(self, entry: ChunkKV) -> int:
        return max_file_bytes(entry)

    def put(self, entry: ChunkKV) -> int:
        path = self._root / entry_path(entry.key)
        make_folder(self._root, *path.relative_to(self._root).parts[:-1])
        # In a folder of our own on the same filesystem, so that cleaning up can never touch anybody's files.
        temporary = make_folder(self._root, INCOMING) / uuid.uuid4().hex
        try:
            size = write_entry(temporary, entry, self._check.seal)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        # Not only at start: an engine runs for months, and others may die beside it.
        self._remove_stale_temporary_files()
        return size

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        held = []
        for key in keys:
            held.append(self.size(key) is not None)
            self.progress += 1
        return held

    def delete(self, key: ChunkKey) -> None:
        self.progress += 1
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._root / entry_path(key))

    def scan(self) -> Iterator[EntryInfo]:
        """Reads headers only. Looks only at files named like ours, so that a directory with somebody's
        other safetensors files keeps them."""
        found = []
        for path, status in self._files():
            self.progress += 1
            if _ENTRY_NAME.fullmatch(path.name):
                found.append((status.st_mtime_ns, status.st_size, path))
        for written_ns, size, path in sorted(found):
            self.progress += 1
            label = self._label_of(path)
            if label is not None:
                key, kind = label
                yield EntryInfo(key, size, self.name, pinned=False, since=written_ns / 1e9, kind=kind)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Regular files four levels down, and nothing that a link leads to."""
        folders = [self._root]
        for depth in range(3):
            folders = [
                Path(each.path)
                for folder in folders
                for each in _listed(folder)
                if each.is_dir(follow_symlinks=False)
            ]
            if depth == 0:
                ours = [folder for folder in folders if folder.name not in (SET_ASIDE, INCOMING)]
                folders = [folder for folder in ours if self._tenant in (None, folder.name)]
        for folder in folders:
            for each in _listed(folder):
                with suppress(OSError):  # another process may remove it at any time
                    status = each.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Path(each.path), status

    def _label_of(self, path: Path) -> tuple[ChunkKey, EntryKind | None] | None:
        try:
            key, kind = read_key(path)
            if self._root / entry_path(key) != path:
                raise CorruptEntryError(f"holds the entry of another key, {key}")
            return key, kind
        except CorruptEntryError as error:
            self._set_aside(path, error)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("cannot read %s (%s); check its permissions", path, error)
        return None

    def remove_set_aside(self) -> None:
        """Delete the damaged files that were kept for a look."""
        folder = self._root / SET_ASIDE
        with suppress(OSError):
            if stat.S_ISDIR(os.lstat(folder).st_mode):
                shutil.rmtree(folder, ignore_errors=True)
            else:  # rmtree would open it, and wait for ever if it is a pipe
                os.unlink(folder)

    def _set_aside(self, path: Path, reason: Exception) -> None:
        """Move a file away, so that it is neither met again nor lost."""
        target = self._root / SET_ASIDE / path.relative_to(self._root)
        target = target.with_name(f"{target.name}.{time.time_ns()}")
        try:
            make_folder(self._root, *target.relative_to(self._root).parts[:-1])
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
        now = time.time()
        if now < self._next_cleaning:
            return
        self._next_cleaning = now + CLEANING_SECONDS
        folder = self._root / INCOMING
        if folder.is_symlink():  # to somebody's files
            return
        for each in _listed(folder):
            with suppress(OSError):
                if now - each.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                    os.unlink(each.path)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it cannot be read, or is none by now."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
