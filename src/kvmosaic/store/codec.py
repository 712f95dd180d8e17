"""An entry as safetensors bytes: tensors ``tokens``, ``context`` and ``kv``, checksums in the metadata.

The same bytes are a file on disk and a value in a remote store. Any safetensors reader can open them and slice
``kv`` by heads; only the library's own functions are not used, as they copy all KV once more or map the file: a
mapped file could change after it was verified, and one that somebody truncates would end the process with a bus
error.
"""

import json
import os
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.window import WindowTails
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.memory import POOL, Bytes

FORMAT_NAME = "kvmosaic-entry-2"
MAX_HEADER_BYTES = 1024**2
ALIGNMENT = 64
"""Bytes; the KV starts at a multiple of it."""

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
    """The bytes of ``entry`` in two parts that follow one another: all that is small, and the KV, which is not copied
    when it is contiguous in host memory."""
    data = entry.data.cpu().contiguous()
    tokens = np.asarray(entry.tokens, "<i4").view(np.uint8)
    context = np.asarray(entry.context, "<i4").view(np.uint8)
    kv = _bytes_of(data)
    fields = _fields(entry, kv)
    fields["checksum"] = _checksum(fields, tokens, context)
    header: dict[str, Any] = {"__metadata__": fields}
    end = 0
    for name, dtype, shape, nbytes in (
        ("tokens", "I32", [len(entry.tokens)], tokens.nbytes),
        ("context", "I32", [len(entry.context)], context.nbytes),
        ("kv", _DTYPE_NAMES[data.dtype], list(data.shape), kv.nbytes),
    ):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces are part of the format. They align the KV, which is used where it was received.
    text += b" " * (-(8 + len(text) + tokens.nbytes + context.nbytes) % ALIGNMENT)
    small = len(text).to_bytes(8, "little") + text + tokens.tobytes() + context.tobytes()
    return [memoryview(small), kv.reshape(-1).data]


def decode(value: Sequence[Bytes], key: ChunkKey) -> ChunkKV:
    """Verify that ``value``, parts that follow one another, is the entry of ``key``. Its KV is then used where it is,
    unless it is spread over several parts. Raises :class:`CorruptEntryError` if anything differs."""
    return _decode(_Memory(value), key)


def write_entry(path: Path, entry: ChunkKV) -> None:
    """Write ``entry`` to a file for this user alone; raises ``OSError``."""
    with open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        for part in encode(entry):
            while part:  # a single write may be partial, at the latest from 2 GiB on
                part = part[file.write(part) :]


def max_file_bytes(entry: ChunkKV) -> int:
    """An upper bound, in bytes, of the file of ``entry``."""
    longest_key = 2 * len(str(entry.key))  # JSON escapes at most double what quoting leaves
    small = 4 * (len(entry.tokens) + len(entry.context)) + 33 * entry.format.heads + 4 * entry.format.layers
    return entry.nbytes + small + longest_key + 1024


def read_key(path: Path) -> ChunkKey:
    """The key a file says it holds, from its header alone; also checks that the file has its full size."""
    with open(path, "rb") as file:
        try:
            return ChunkKey.parse(_read_header(_File(file))["__metadata__"]["key"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptEntryError(f"unreadable header: {error!r}") from error


def read_entry(path: Path, key: ChunkKey) -> ChunkKV:
    """Read and verify the entry of ``key``; raises :class:`CorruptEntryError` if anything differs."""
    with open(path, "rb") as file:
        return _decode(_File(file), key)


class _Source(Protocol):
    """Where an entry's bytes come from."""

    nbytes: int

    def read(self, first: int, last: int) -> Bytes: ...


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


class _File:
    def __init__(self, file: BufferedReader) -> None:
        self.nbytes = os.fstat(file.fileno()).st_size
        self._file = file

    def read(self, first: int, last: int) -> Bytes:
        buffer = POOL.take(last - first)
        self._file.seek(first)
        if self._file.readinto(buffer.data) != len(buffer):
            raise ValueError("the file was truncated while it was read")
        return buffer


def _decode(source: _Source, key: ChunkKey) -> ChunkKV:
    try:
        return _read_entry(source, key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptEntryError(str(error) or repr(error)) from error


def _read_entry(source: _Source, key: ChunkKey) -> ChunkKV:
    header = _read_header(source)
    fields: dict[str, str] = header["__metadata__"]
    if fields["key"] != str(key):
        raise ValueError(f"holds the entry of another key, {fields['key']}")
    tokens, context = _read_tensor(source, header, "tokens"), _read_tensor(source, header, "context")
    if fields.pop("checksum") != _checksum(fields, tokens, context):
        raise ValueError("the checksum of key, tokens, context and format does not match")
    # From here on the fields are the ones that were written.
    kv_format = KVFormat(
        layers=int(fields["layers"]),
        heads=int(fields["heads"]),
        k_dim=int(fields["k_dim"]),
        v_dim=int(fields["v_dim"]),
        dtype=getattr(torch, fields["dtype"]),
        tails=WindowTails(tuple(map(int, fields["windowed"].split())), int(fields["tail"])),
    )
    data = _read_tensor(source, header, "kv").reshape(kv_format.heads, -1)
    if fields["head_checksums"] != _head_checksums(data):
        raise ValueError("the checksum of a head does not match")
    kv = torch.from_numpy(data).view(kv_format.dtype)
    if header["kv"]["shape"] != list(kv.shape):
        raise ValueError("the shape in the header does not match")
    return ChunkKV(key, _ints(tokens), _ints(context), kv_format, kv)


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


def _fields(entry: ChunkKV, kv: Bytes) -> dict[str, str]:
    return {
        "format": FORMAT_NAME,
        "key": str(entry.key),
        "layers": str(entry.format.layers),
        "heads": str(entry.format.heads),
        "k_dim": str(entry.format.k_dim),
        "v_dim": str(entry.format.v_dim),
        "dtype": str(entry.format.dtype).removeprefix("torch."),
        "windowed": " ".join(map(str, entry.format.tails.layers)),
        "tail": str(entry.format.tails.tokens),
        "head_checksums": _head_checksums(kv),
    }


def _checksum(fields: dict[str, str], tokens: Bytes, context: Bytes) -> str:
    """Over everything but the heads' bytes, whose own checksums are among ``fields``."""
    digest = xxhash.xxh3_128(json.dumps([fields, len(tokens), len(context)], sort_keys=True).encode())
    digest.update(tokens.data)
    digest.update(context.data)
    return digest.hexdigest()


def _head_checksums(data: Bytes) -> str:
    """One per head, so that a reader of some heads can verify just those. ``data`` is ``[heads, bytes]``."""
    return " ".join(xxhash.xxh3_128_hexdigest(head.data) for head in data)


def _bytes_of(data: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor as ``[first dimension, bytes]``; not a copy."""
    raw: Bytes = data.view(torch.uint8).flatten(1).numpy()
    return raw


def _ints(raw: Bytes) -> tuple[int, ...]:
    return tuple(raw.view("<i4").tolist())
