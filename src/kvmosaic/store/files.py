"""Entries in files that only this user can access. Links are not followed, and pipes are not waited for."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvmosaic.core.entry import ChunkKV, EntryKind
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.codec import NO_CHECKSUM, Encoding, decode_from
from kvmosaic.store.header import read_header
from kvmosaic.store.memory import POOL, Bytes
from kvmosaic.store.seal import EntryCheck, Seal, hexdigest
from kvmosaic.store.threads import Threads

FILE_MODE, FOLDER_MODE = 0o600, 0o700
SLICE_BYTES = 256 * 1024
"""Bytes of a head that are read and then hashed, while they are still in the processor's cache."""
WORTH_THREADS = 2 * 2**20
"""Minimum bytes of KV that are read by several threads."""
NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR)
"""Errors for opening a symbolic link, a socket, a device without a driver."""
READS_ATTRIBUTE = "user.kvmosaic.reads"
"""Extended attribute of a file with the number of times that engines read it."""
_THREADS = Threads()


@contextmanager
def folder_below(root: Path, names: Sequence[str], make: bool = False) -> Iterator[int]:
    """A descriptor of the folder ``names`` below ``root``. ``root`` may be a link; a link below it is never followed,
    no matter when it was created. ``make``: create missing folders, which only this user can access. Raises
    ``NotADirectoryError`` if a link or anything else is in the place of a folder."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, FOLDER_MODE, dir_fd=descriptor)
            outer, descriptor = descriptor, _open_folder(descriptor, name)
            os.close(outer)
            if make:
                _close_to_others(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(above: int, name: str) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        if error.errno == errno.ELOOP:  # for a link on some systems; others say ENOTDIR
            raise NotADirectoryError(errno.ENOTDIR, "a symbolic link instead of a folder", name) from error
        raise


def _close_to_others(folder: int) -> None:
    status = os.fstat(folder)
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():  # made by an earlier release
        os.fchmod(folder, FOLDER_MODE)


@contextmanager
def opened(folder: int, name: str) -> Iterator[int]:
    """A descriptor for reading a regular file. Raises :class:`CorruptEntryError` if it is anything else: a pipe could
    block forever, and a link could lead anywhere."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in NOT_A_FILE:
            raise CorruptEntryError("not a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptEntryError("not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def write_entry(folder: int, name: str, entry: ChunkKV, seal: Seal) -> int:
    """Write ``entry`` to a new file. Returns the file's bytes. Raises ``OSError``."""
    encoding, key = Encoding(entry, seal), str(entry.key)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, FILE_MODE, dir_fd=folder)
    try:
        start = len(encoding.small(key, [NO_CHECKSUM] * entry.format.heads))
        _reserve(descriptor, start + encoding.kv.nbytes)
        checksums = _THREADS.start(partial(seal.heads, encoding.kv), or_here=True)
        try:
            _write_at(descriptor, encoding.kv.reshape(-1).data, start)
        finally:
            checksums.wait(None)  # its thread reads the caller's memory
        _write_at(descriptor, memoryview(encoding.small(key, checksums.result())), 0)
        return start + encoding.kv.nbytes
    finally:
        os.close(descriptor)


class Label(NamedTuple):
    """Facts about an entry, from the header of its file."""

    key: ChunkKey
    kind: EntryKind | None
    reads: int | None
    """Number of times that engines read it; ``None`` if the file system cannot store that."""


def read_label(folder: int, name: str) -> Label:
    """The label of a file, from its header alone. Also checks that the file has its full size."""
    with opened(folder, name) as descriptor:
        try:
            header = read_header(_File(descriptor))
            return Label(ChunkKey.parse(header.fields["key"]), header.kind, _reads(descriptor))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptEntryError(f"unreadable header: {repr(error)[:500]}") from error


def read_entry(folder: int, name: str, key: ChunkKey, check: EntryCheck, *, is_counted: bool) -> ChunkKV:
    """Read and verify the entry of ``key``; raises :class:`CorruptEntryError` if anything differs. ``is_counted``:
    add one to the file's number of reads."""
    with opened(folder, name) as descriptor:
        decoded = decode_from(_File(descriptor), str(key), check)
        if is_counted:
            _count_read(descriptor)
    return decoded.entry(key, decoded.kv, decoded.format)


def _reads(descriptor: int) -> int | None:
    try:
        return int(os.getxattr(descriptor, READS_ATTRIBUTE)[:20])
    except ValueError:  # written by another program
        return None
    except OSError as error:
        return 0 if error.errno == errno.ENODATA else None
    except AttributeError:  # not every system's Python has extended attributes
        return None


def _count_read(descriptor: int) -> None:
    """Two concurrent reads may be counted as one; the number is only informative."""
    reads = _reads(descriptor)
    if reads is not None:
        with suppress(OSError):  # a read-only file system
            os.setxattr(descriptor, READS_ATTRIBUTE, str(reads + 1).encode())


class _File:
    def __init__(self, descriptor: int) -> None:
        self.nbytes = os.fstat(descriptor).st_size
        self._descriptor = descriptor

    def read(self, first: int, last: int) -> Bytes:
        buffer = POOL.take(last - first)
        _read_at(self._descriptor, buffer, first)
        return buffer

    def read_heads(self, first: int, last: int, heads: int, seal: Seal) -> tuple[Bytes, list[str]]:
        kv = POOL.take(last - first).reshape(heads, -1)
        reads = [partial(self._read_head, head, first + index * head.nbytes, seal) for index, head in enumerate(kv)]
        return kv, _THREADS.map(reads) if kv.nbytes >= WORTH_THREADS else [read() for read in reads]

    def _read_head(self, head: Bytes, start: int, seal: Seal) -> str:
        digest = seal.for_head()
        for at in range(0, len(head), SLICE_BYTES):
            part = head[at : at + SLICE_BYTES]
            _read_at(self._descriptor, part, start + at)
            digest.update(part.data)
        return hexdigest(digest)


def _read_at(descriptor: int, buffer: Bytes, at: int) -> None:
    left = buffer.data
    while left:  # a single read may be partial, and is above 2 GiB
        count = os.preadv(descriptor, [left], at)
        if count == 0:
            raise ValueError("the file was truncated while it was read")
        left, at = left[count:], at + count


def _reserve(descriptor: int, nbytes: int) -> None:
    """Allocate disk space for a whole file: faster than page by page, and a full disk is reported at once."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not supported by the file system
                raise


def _write_at(descriptor: int, left: memoryview, at: int) -> None:
    while left:  # a single write may be partial
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count
