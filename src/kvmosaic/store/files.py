"""Entries in files of this user's alone. What else is put in their place is neither waited for nor followed."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

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
"""Of a head, verified while the processor's cache still has them from being read."""
WORTH_THREADS = 2 * 2**20
"""Bytes of an entry that is read by several threads."""
NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR)
"""What systems say to a symbolic link, a socket, a device without a driver."""
_THREADS = Threads()


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor for reading a regular file; raises :class:`CorruptEntryError` if it is anything else, of which a
    pipe would wait for ever and a link could lead anywhere."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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


def make_folder(root: Path, *names: str) -> Path:
    """A folder below ``root`` that only this user can look into. Raises ``NotADirectoryError`` if something else, or
    a link to a folder, stands where it or one above it should be."""
    folder = root
    for name in names:
        folder = folder / name
        try:
            os.mkdir(folder, FOLDER_MODE)
        except FileExistsError:
            status = os.lstat(folder)
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder of its own", str(folder)) from None
            if status.st_mode & 0o077 and status.st_uid == os.geteuid():  # made by an earlier release
                os.chmod(folder, FOLDER_MODE)
    return folder


def write_entry(path: Path, entry: ChunkKV, seal: Seal) -> int:
    """Write ``entry`` to a new file; its bytes. Raises ``OSError``."""
    encoding, key = Encoding(entry, seal), str(entry.key)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        start = len(encoding.small(key, [NO_CHECKSUM] * entry.format.heads))
        _reserve(descriptor, start + encoding.kv.nbytes)
        checksums = _THREADS.start(partial(seal.heads, encoding.kv), or_here=True)
        try:
            _write_at(descriptor, encoding.kv.reshape(-1).data, start)
        finally:
            checksums.wait(None)  # it reads memory that is the caller's
        _write_at(descriptor, memoryview(encoding.small(key, checksums.result())), 0)
        return start + encoding.kv.nbytes
    finally:
        os.close(descriptor)


def read_key(path: Path) -> tuple[ChunkKey, EntryKind | None]:
    """The key a file says it holds, and what for, from its header alone; also checks that the file has its full
    size."""
    with opened(path) as descriptor:
        try:
            header = read_header(_File(descriptor))
            return ChunkKey.parse(header.fields["key"]), header.kind
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptEntryError(f"unreadable header: {repr(error)[:500]}") from error


def read_entry(path: Path, key: ChunkKey, check: EntryCheck) -> ChunkKV:
    """Read and verify the entry of ``key``; raises :class:`CorruptEntryError` if anything differs."""
    with opened(path) as descriptor:
        decoded = decode_from(_File(descriptor), str(key), check)
    return decoded.entry(key, decoded.kv)


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
    while left:  # a single read may be partial, at the latest from 2 GiB on
        count = os.preadv(descriptor, [left], at)
        if count == 0:
            raise ValueError("the file was truncated while it was read")
        left, at = left[count:], at + count


def _reserve(descriptor: int, nbytes: int) -> None:
    """Have the system find room for a whole file: faster than page by page, and it says at once if there is none."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a filesystem that cannot
                raise


def _write_at(descriptor: int, left: memoryview, at: int) -> None:
    while left:  # likewise
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count
