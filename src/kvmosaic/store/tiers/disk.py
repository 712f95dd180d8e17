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
from itertools import groupby, islice
from pathlib import Path
from urllib.parse import quote

import xxhash

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import KEY_PART
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.limits import shown
from kvmosaic.store.base import CorruptEntryError, EntryInfo, Tier
from kvmosaic.store.codec import max_file_bytes
from kvmosaic.store.files import FOLDER_MODE, Label, folder_below, read_entry, read_label, write_entry
from kvmosaic.store.seal import ANY_ENTRY, EntryCheck

logger = logging.getLogger(__name__)

SET_ASIDE = "set-aside"
INCOMING = "incoming"
SUFFIX = ".safetensors"
STALE_SECONDS = 3600
CLEANING_SECONDS = 1.0
"""Minimum seconds between two searches for files that dead writers left."""
SORTED_AT_ONCE = 2**19
"""Maximum number of files that are listed oldest first. Of more, the oldest are not the first."""
_MAX_NAME = 100
Parts = tuple[str, ...]
"""Names of folders below the root, and of a file in the last one."""
_ENTRY_NAME = re.compile(rf"[0-9a-f]{{32}}-\d+-({KEY_PART.pattern})\.safetensors", re.ASCII)


def entry_path(key: ChunkKey) -> Path:
    """Path of the entry of ``key`` below the root: ``tenant/model/fingerprint/hash-tokens-heads.safetensors``."""
    folders = map(folder_name, (key.tenant, key.model, key.fingerprint))
    return Path(*folders, f"{key.content_hash.hex()}-{key.num_tokens}-{key.heads}{SUFFIX}")


def folder_name(text: str) -> str:
    """A folder name, different for different texts and never one with another meaning."""
    name = quote(text, safe="")
    if len(name) > _MAX_NAME:
        return f"{name[:_MAX_NAME]}%{xxhash.xxh3_128_hexdigest(text.encode())}"
    if name in ("", ".", "..", SET_ASIDE, INCOMING):
        return f"%{name}"  # quoting never yields "%" followed by one of these
    return name


class DiskTier(Tier):
    """One safetensors file per entry, found by its key alone: there is no index to keep consistent.

    A file appears complete or not at all. A power loss may still leave a damaged file, because nothing waits for the
    disk; its checksums reveal that. The byte budget covers the files that this process wrote or found. If a
    ``tenant`` is given, it covers all files of that tenant; other files are ignored, so they are never evicted.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        capacity: int,
        tenant: str | None = None,
        check: EntryCheck = ANY_ENTRY,
        *,
        counts_reads: bool = False,
    ) -> None:
        """``check``: requirements for entries. ``counts_reads``: files keep the number of times they were read."""
        self.capacity = capacity
        self._check = check
        self._counts_reads = counts_reads
        self.shares_budget = tenant is not None
        self.set_aside = 0
        self._root = root
        self._tenant = None if tenant is None else folder_name(tenant)
        self._next_cleaning = 0.0

    def prepare(self) -> None:
        self._root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._root.mkdir(mode=FOLDER_MODE)  # an existing one keeps its permissions; `doctor` warns
        self.check()
        self._remove_stale_temporary_files()

    def check(self) -> None:
        os.listdir(self._root)  # raises if the directory cannot be read

    def size(self, key: ChunkKey) -> int | None:
        *folders, name = entry_path(key).parts
        try:
            with folder_below(self._root, folders) as folder:
                return _size_of(name, folder)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def get(self, key: ChunkKey) -> ChunkKV | None:
        *folders, name = parts = entry_path(key).parts
        try:
            with folder_below(self._root, folders) as folder:
                return read_entry(folder, name, key, self._check.of(key), is_counted=self._counts_reads)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CorruptEntryError as error:
            self._set_aside(parts, error)
            raise

    def nbytes(self, entry: ChunkKV) -> int:
        return max_file_bytes(entry)

    def put(self, entry: ChunkKV) -> int:
        *folders, name = entry_path(entry.key).parts
        # In a folder of our own on the same file system, so that cleaning up never touches other files.
        temporary = uuid.uuid4().hex
        with (
            folder_below(self._root, folders, make=True) as folder,
            folder_below(self._root, [INCOMING], make=True) as incoming,
        ):
            try:
                size = write_entry(incoming, temporary, entry, self._check.seal)
                os.replace(temporary, name, src_dir_fd=incoming, dst_dir_fd=folder)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=incoming)
                raise
        # Not only at start: an engine runs for months, and other writers may die meanwhile.
        self._remove_stale_temporary_files()
        return size

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        held: dict[ChunkKey, bool] = {}
        paths = [(key, entry_path(key).parts) for key in keys]
        for folders, inside in groupby(paths, key=lambda each: each[1][:-1]):  # an engine's are in one folder
            with suppress(FileNotFoundError, NotADirectoryError), folder_below(self._root, folders) as folder:
                for key, (*_, name) in inside:
                    held[key] = _size_of(name, folder) is not None
                    self.progress += 1
        return [held.get(key, False) for key in keys]

    def delete(self, key: ChunkKey) -> None:
        self.progress += 1
        *folders, name = entry_path(key).parts
        with suppress(FileNotFoundError, NotADirectoryError), folder_below(self._root, folders) as folder:
            os.unlink(name, dir_fd=folder)

    def scan(self) -> Iterator[EntryInfo]:
        """Reads headers only, and only of files named like ours: other safetensors files in the directory are left
        alone."""
        self.check()  # otherwise a disk that fails would seem to be empty
        ours = (
            (status.st_mtime_ns, status.st_size, parts)
            for parts, status in self._files()
            if stat.S_ISREG(status.st_mode) and _ENTRY_NAME.fullmatch(parts[-1])
        )
        while found := sorted(islice(ours, SORTED_AT_ONCE)):
            for written_ns, size, parts in found:
                self.progress += 1
                label = self._label_of(parts)
                if label is not None:
                    key, kind, reads = label
                    since = written_ns / 1e9
                    yield EntryInfo(key, size, self.name, pinned=False, since=since, hits=reads, kind=kind)

    def _files(self) -> Iterator[tuple[Parts, os.stat_result]]:
        """Everything four levels below the root. Links are not followed."""
        folders: list[Parts] = [()]
        for depth in range(3):
            folders = [
                (*folder, name)
                for folder in folders
                for name, status in self._listed(folder)
                if stat.S_ISDIR(status.st_mode)
            ]
            if depth == 0:
                ours = [folder for folder in folders if folder[0] not in (SET_ASIDE, INCOMING)]
                folders = [folder for folder in ours if self._tenant in (None, folder[0])]
        for folder in folders:
            for name, status in self._listed(folder):
                yield (*folder, name), status

    def _listed(self, names: Parts) -> list[tuple[str, os.stat_result]]:
        """The contents of a folder; empty if it cannot be read or is not a folder any more."""
        found = []
        with suppress(OSError), folder_below(self._root, names) as folder, os.scandir(folder) as entries:
            for each in entries:
                self.progress += 1
                with suppress(OSError):  # another process may remove it at any time
                    found.append((each.name, each.stat(follow_symlinks=False)))
        return found

    def _label_of(self, parts: Parts) -> Label | None:
        *folders, name = parts
        try:
            with folder_below(self._root, folders) as folder:
                label = read_label(folder, name)
            if entry_path(label.key).parts != parts:
                raise CorruptEntryError(f"holds the entry of another key, {shown(str(label.key))}")
            return label
        except CorruptEntryError as error:
            self._set_aside(parts, error)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            logger.warning("cannot read %s (%s); check its permissions", self._root.joinpath(*parts), error)
        return None

    def remove_set_aside(self) -> None:
        """Delete the damaged files that were kept for inspection."""
        folder = self._root / SET_ASIDE
        with suppress(OSError):
            if stat.S_ISDIR(os.lstat(folder).st_mode):
                shutil.rmtree(folder, ignore_errors=True)
            else:  # rmtree would open it, and block forever if it is a pipe
                os.unlink(folder)

    def _set_aside(self, parts: Parts, reason: Exception) -> None:
        """Move a damaged file away, so that it is neither read again nor lost."""
        *folders, name = parts
        kept_folders, kept_name = (SET_ASIDE, *folders), f"{name}.{time.time_ns()}"
        try:
            with (
                folder_below(self._root, folders) as folder,
                folder_below(self._root, kept_folders, make=True) as kept,
            ):
                os.rename(name, kept_name, src_dir_fd=folder, dst_dir_fd=kept)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            path = self._root.joinpath(*parts)
            logger.warning("%s is damaged (%s) and cannot be moved (%s); please remove it", path, reason, error)
            return
        self.set_aside += 1
        logger.warning("set a damaged entry aside: %s (%s)", self._root.joinpath(*kept_folders, kept_name), reason)

    def _remove_stale_temporary_files(self) -> None:
        """Delete temporary files of writers that died. A living writer takes seconds."""
        now = time.time()
        if now < self._next_cleaning:
            return
        self._next_cleaning = now + CLEANING_SECONDS
        stale = [name for name, status in self._listed((INCOMING,)) if now - status.st_mtime > STALE_SECONDS]
        if stale:
            with suppress(OSError), folder_below(self._root, [INCOMING]) as folder:
                for name in stale:
                    with suppress(OSError):
                        os.unlink(name, dir_fd=folder)


def _size_of(name: str, folder: int) -> int | None:
    """Bytes of a regular file in an open folder; ``None`` if there is none. A put replaces anything else."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
