"""An entry as safetensors bytes: tensors ``tokens``, ``context`` and ``kv``, checksums in the metadata.

The same bytes are a file on disk and a value in a remote store. Any safetensors reader can open them and slice
``kv`` by heads; only the library's own functions are not used, as they copy all KV once more or map the file: a
mapped file could change after it was verified, and one that somebody truncates would end the process with a bus
error.
"""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.window import WindowTails
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.memory import POOL, Bytes
from kvmosaic.store.threads import Threads

FORMAT_NAME = "kvmosaic-entry-2"
MAX_HEADER_BYTES = 1024**2
FORMAT_FIELDS = ("layers", "heads", "k_dim", "v_dim", "dtype", "windowed", "tail")
ALIGNMENT = 64
"""Bytes; the KV starts at a multiple of it."""
SLICE_BYTES = 256 * 1024
"""Of a head, verified while the processor's cache still has them from being read."""
WORTH_THREADS = 2 * 2**20
"""Bytes of an entry that is read by several threads."""
NO_CHECKSUM = xxhash.xxh3_128_hexdigest(b"")
_THREADS = Threads()

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""As safetensors calls them."""


def encode(entry: ChunkKV) -> list[memoryview]:
    """The bytes of ``entry``, see :meth:`Encoding.value`."""
    return Encoding(entry).value(str(entry.key), 0, entry.format.heads)


class Encoding:
    """An entry about to be written, as a whole or head by head: what its values have in common is made once."""

    def __init__(self, entry: ChunkKV) -> None:
        data = entry.data.cpu().contiguous()
        self.kv = _bytes_of(data)
        """``[heads, bytes]``."""
        self._dtype, self._numbers = _DTYPE_NAMES[data.dtype], data.shape[1]
        self._tokens = np.asarray(entry.tokens, "<i4").view(np.uint8)
        self._context = np.asarray(entry.context, "<i4").view(np.uint8)
        self._fields = {
            "format": FORMAT_NAME,
            "layers": str(entry.format.layers),
            "k_dim": str(entry.format.k_dim),
            "v_dim": str(entry.format.v_dim),
            "dtype": str(entry.format.dtype).removeprefix("torch."),
            "windowed": " ".join(map(str, entry.format.tails.layers)),
            "tail": str(entry.format.tails.tokens),
        }

    def value(self, key: str, first: int, end: int) -> list[memoryview]:
        """Heads from ``first`` to before ``end`` as the entry of ``key``, in two parts that follow one another: all
        that is small, and the KV, which is not copied when it is contiguous in host memory."""
        kv = self.kv[first:end]
        return [memoryview(self.small(key, _head_checksums(kv))), kv.reshape(-1).data]

    def small(self, key: str, head_checksums: Sequence[str]) -> bytes:
        """What precedes the KV of ``heads`` heads. Its length does not depend on the checksums."""
        heads, tokens, context = len(head_checksums), self._tokens, self._context
        fields = {**self._fields, "key": key, "heads": str(heads), "head_checksums": " ".join(head_checksums)}
        fields["checksum"] = _checksum(fields, tokens, context)
        header: dict[str, Any] = {"__metadata__": fields}
        at = 0
        for name, dtype, shape, nbytes in (
            ("tokens", "I32", [tokens.nbytes // 4], tokens.nbytes),
            ("context", "I32", [context.nbytes // 4], context.nbytes),
            ("kv", self._dtype, [heads, self._numbers], heads * self.kv.shape[1]),
        ):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        # Spaces are part of the format. They align the KV, which is used where it was received.
        text += b" " * (-(8 + len(text) + tokens.nbytes + context.nbytes) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text + tokens.tobytes() + context.tobytes()


class DecodedEntry(NamedTuple):
    """What is in a value, verified."""

    tokens: Bytes
    context: Bytes
    format: KVFormat
    kv: Bytes
    """``[heads, bytes]``."""

    def entry(self, key: ChunkKey, kv: Bytes) -> ChunkKV:
        """As the entry of ``key``, with ``kv`` of maybe more heads; a :class:`CorruptEntryError` if it is none."""
        kv_format = self.format if len(kv) == self.format.heads else replace(self.format, heads=len(kv))
        try:
            data = torch.from_numpy(kv).view(kv_format.dtype)
            return ChunkKV(key, _ints(self.tokens), _ints(self.context), kv_format, data)
        except ValueError as error:
            raise CorruptEntryError(str(error)) from error


def decode(value: Sequence[Bytes], key: str) -> DecodedEntry:
    """Verify that ``value``, parts that follow one another, is the entry of ``key``. What is decoded lives in its
    memory, unless it is spread over several parts. Raises :class:`CorruptEntryError` if anything differs."""
    return _decode(_Memory(value), key)


def write_entry(path: Path, entry: ChunkKV) -> None:
    """Write ``entry`` to a file for this user alone; raises ``OSError``."""
    encoding, key = Encoding(entry), str(entry.key)
    with open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        start = len(encoding.small(key, [NO_CHECKSUM] * entry.format.heads))
        _reserve(file.fileno(), start + encoding.kv.nbytes)
        checksums = _THREADS.start(partial(_head_checksums, encoding.kv), or_here=True)
        try:
            _write_at(file.fileno(), encoding.kv.reshape(-1).data, start)
        finally:
            checksums.wait(None)  # it reads memory that is the caller's
        _write_at(file.fileno(), memoryview(encoding.small(key, checksums.result())), 0)


def max_file_bytes(entry: ChunkKV) -> int:
    """An upper bound, in bytes, of the file of ``entry``."""
    longest_key = 2 * len(str(entry.key))  # JSON escapes at most double what quoting leaves
    small = 4 * (len(entry.tokens) + len(entry.context)) + 33 * entry.format.heads + 4 * entry.format.layers
    return entry.nbytes + small + longest_key + 1024


def read_key(path: Path) -> ChunkKey:
    """The key a file says it holds, from its header alone; also checks that the file has its full size."""
    with open(path, "rb", buffering=0) as file:
        try:
            return ChunkKey.parse(_read_header(_File(file.fileno()))["__metadata__"]["key"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptEntryError(f"unreadable header: {error!r}") from error


def read_entry(path: Path, key: ChunkKey) -> ChunkKV:
    """Read and verify the entry of ``key``; raises :class:`CorruptEntryError` if anything differs."""
    with open(path, "rb", buffering=0) as file:
        decoded = _decode(_File(file.fileno()), str(key))
    return decoded.entry(key, decoded.kv)


class _Source(Protocol):
    """Where an entry's bytes come from."""

    nbytes: int

    def read(self, first: int, last: int) -> Bytes: ...

    def read_heads(self, first: int, last: int, heads: int) -> tuple[Bytes, list[str]]:
        """``[heads, bytes]``, and the checksum of each."""


class _Memory:
    def __init__(self, value: Sequence[Bytes]) -> None:
        self.nbytes = sum(map(len, value))
        self._value = value

    def read(self, first: int, last: int) -> Bytes:
        pieces, start = [], 0
        for part in self._value:
            pieces.append(part[max(0, first - start) : max(0, last - start)])
            start += len(part)
        filled = [piece for piece in pieces if len(piece)]
        return filled[0] if len(filled) == 1 else np.concatenate(pieces)

    def read_heads(self, first: int, last: int, heads: int) -> tuple[Bytes, list[str]]:
        kv = self.read(first, last).reshape(heads, -1)
        return kv, _head_checksums(kv)


class _File:
    def __init__(self, descriptor: int) -> None:
        self.nbytes = os.fstat(descriptor).st_size
        self._descriptor = descriptor

    def read(self, first: int, last: int) -> Bytes:
        buffer = POOL.take(last - first)
        _read_at(self._descriptor, buffer, first)
        return buffer

    def read_heads(self, first: int, last: int, heads: int) -> tuple[Bytes, list[str]]:
        kv = POOL.take(last - first).reshape(heads, -1)
        reads = [partial(self._read_head, head, first + index * head.nbytes) for index, head in enumerate(kv)]
        return kv, _THREADS.map(reads) if kv.nbytes >= WORTH_THREADS else [read() for read in reads]

    def _read_head(self, head: Bytes, start: int) -> str:
        digest = xxhash.xxh3_128()
        for at in range(0, len(head), SLICE_BYTES):
            part = head[at : at + SLICE_BYTES]
            _read_at(self._descriptor, part, start + at)
            digest.update(part.data)
        return digest.hexdigest()


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


def _decode(source: _Source, key: str) -> DecodedEntry:
    try:
        return _read(source, key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptEntryError(str(error) or repr(error)) from error


def _read(source: _Source, key: str) -> DecodedEntry:
    header = _read_header(source)
    fields: dict[str, str] = header["__metadata__"]
    if fields["key"] != key:
        raise ValueError(f"holds the entry of another key, {fields['key']}")
    tokens, context = _read_tensor(source, header, "tokens"), _read_tensor(source, header, "context")
    if fields.pop("checksum") != _checksum(fields, tokens, context):
        raise ValueError("the checksum of key, tokens, context and format does not match")
    # From here on the fields are the ones that were written.
    kv_format = _format(*map(fields.__getitem__, FORMAT_FIELDS))
    first, last = header["kv"]["data_offsets"]
    kv, checksums = source.read_heads(first, last, kv_format.heads)
    if fields["head_checksums"].split(" ") != checksums:
        raise ValueError("the checksum of a head does not match")
    heads, numbers = header["kv"]["shape"]
    if (heads, numbers * kv_format.dtype.itemsize) != kv.shape:
        raise ValueError("the shape in the header does not match")
    return DecodedEntry(tokens, context, kv_format, kv)


@lru_cache(maxsize=1024)
def _format(layers: str, heads: str, k_dim: str, v_dim: str, dtype: str, windowed: str, tail: str) -> KVFormat:
    tails = WindowTails(tuple(map(int, windowed.split())), int(tail))
    return KVFormat(int(layers), int(heads), int(k_dim), int(v_dim), getattr(torch, dtype), tails)


def _read_header(source: _Source) -> dict[str, Any]:
    """The parsed header, with ``data_offsets`` turned into offsets in the source."""
    size = source.nbytes
    length = int.from_bytes(source.read(0, min(8, size)).tobytes(), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError("not a safetensors file, or a truncated one")
    header: dict[str, Any] = json.loads(source.read(8, 8 + length).tobytes())
    if header["__metadata__"]["format"] != FORMAT_NAME:
        raise ValueError("not an entry of this format")
    end = start = 8 + length
    for name in sorted(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"]):
        first, last = (start + offset for offset in header[name]["data_offsets"])
        if first != end or last < first:
            raise ValueError("the tensors do not follow one another")
        header[name]["data_offsets"] = first, last
        end = last
    if end != size:
        raise ValueError(f"{size} bytes instead of {end}")
    return header


def _read_tensor(source: _Source, header: dict[str, Any], name: str) -> Bytes:
    return source.read(*header[name]["data_offsets"])


def _checksum(fields: dict[str, str], tokens: Bytes, context: Bytes) -> str:
    """Over everything but the heads' bytes, whose own checksums are among ``fields``."""
    digest = xxhash.xxh3_128(json.dumps([fields, len(tokens), len(context)], sort_keys=True).encode())
    digest.update(tokens.data)
    digest.update(context.data)
    return digest.hexdigest()


def _head_checksums(data: Bytes) -> list[str]:
    """One per head, so that a reader of some heads can verify just those. ``data`` is ``[heads, bytes]``."""
    return [xxhash.xxh3_128_hexdigest(head.data) for head in data]


def _bytes_of(data: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor as ``[first dimension, bytes]``; not a copy."""
    raw: Bytes = data.view(torch.uint8).flatten(1).numpy()
    return raw


def _ints(raw: Bytes) -> tuple[int, ...]:
    return tuple(raw.view("<i4").tolist())
