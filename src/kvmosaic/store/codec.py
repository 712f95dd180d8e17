"""An entry as a safetensors file: tensors ``kv``, ``tokens`` and ``context``, checksums in the metadata.

The library writes the files, and any safetensors reader can open them and slice ``kv`` by heads. Reading
is done here, from one open file into fresh memory: a mapped file could change after it was verified, and
one that somebody truncates would end the process with a bus error.
"""

import json
import os
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError

FORMAT_NAME = "kvmosaic-entry-1"
MAX_HEADER_BYTES = 1024**2

Bytes = npt.NDArray[np.uint8]


def write_entry(path: Path, entry: ChunkKV) -> None:
    """Write ``entry``; raises ``OSError``."""
    data = entry.data.cpu().contiguous()
    tokens = torch.tensor(entry.tokens, dtype=torch.int32)
    context = torch.tensor(entry.context, dtype=torch.int32)
    fields = _fields(entry, data)
    fields["checksum"] = _checksum(fields, _bytes_of(tokens), _bytes_of(context))
    try:
        save_file({"kv": data, "tokens": tokens, "context": context}, path, metadata=fields)
    except SafetensorError as error:  # how the library reports a full or read-only disk
        raise OSError(str(error)) from error


def max_file_bytes(entry: ChunkKV) -> int:
    """An upper bound, in bytes, of the file of ``entry``."""
    longest_key = 2 * len(str(entry.key))  # JSON escapes at most double what quoting leaves
    return entry.nbytes + 4 * (len(entry.tokens) + len(entry.context)) + 33 * entry.format.heads + longest_key + 1024


def read_key(path: Path) -> ChunkKey:
    """The key a file says it holds, from its header alone; also checks that the file has its full size."""
    with open(path, "rb") as file:
        try:
            return ChunkKey.parse(_read_header(file)["__metadata__"]["key"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptEntryError(f"unreadable header: {error!r}") from error


def read_entry(path: Path, key: ChunkKey) -> ChunkKV:
    """Read and verify the entry of ``key``; raises :class:`CorruptEntryError` if anything differs."""
    with open(path, "rb") as file:
        try:
            return _read_entry(file, key)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptEntryError(str(error) or repr(error)) from error


def _read_entry(file: BufferedReader, key: ChunkKey) -> ChunkKV:
    header = _read_header(file)
    fields: dict[str, str] = header["__metadata__"]
    if fields["key"] != str(key):
        raise ValueError(f"holds the entry of another key, {fields['key']}")
    tokens, context = _read_tensor(file, header, "tokens"), _read_tensor(file, header, "context")
    if fields.pop("checksum") != _checksum(fields, tokens, context):
        raise ValueError("the checksum of key, tokens, context and format does not match")
    # From here on the fields are the ones that were written.
    kv_format = KVFormat(
        layers=int(fields["layers"]),
        heads=int(fields["heads"]),
        k_dim=int(fields["k_dim"]),
        v_dim=int(fields["v_dim"]),
        dtype=getattr(torch, fields["dtype"]),
    )
    data = _read_tensor(file, header, "kv").reshape(kv_format.heads, -1)
    if fields["head_checksums"] != _head_checksums(data):
        raise ValueError("the checksum of a head does not match")
    kv = torch.from_numpy(data).view(kv_format.dtype).view(kv_format.heads, kv_format.layers, -1)
    if header["kv"]["shape"] != list(kv.shape):
        raise ValueError("the shape in the header does not match")
    return ChunkKV(key, _ints(tokens), _ints(context), kv_format, kv)


def _read_header(file: BufferedReader) -> dict[str, Any]:
    """The parsed header, with ``data_offsets`` turned into offsets in the file."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError("not a safetensors file, or a truncated one")
    header: dict[str, Any] = json.loads(file.read(length))
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


def _read_tensor(file: BufferedReader, header: dict[str, Any], name: str) -> Bytes:
    first, last = header[name]["data_offsets"]
    # numpy asks for huge pages for large arrays; torch.empty does not and is several times slower to fill.
    buffer = np.empty(last - first, np.uint8)
    file.seek(first)
    if file.readinto(buffer.data) != len(buffer):
        raise ValueError("the file was truncated while it was read")
    return buffer


def _fields(entry: ChunkKV, data: torch.Tensor) -> dict[str, str]:
    return {
        "format": FORMAT_NAME,
        "key": str(entry.key),
        "layers": str(entry.format.layers),
        "heads": str(entry.format.heads),
        "k_dim": str(entry.format.k_dim),
        "v_dim": str(entry.format.v_dim),
        "dtype": str(entry.format.dtype).removeprefix("torch."),
        "head_checksums": _head_checksums(_bytes_of(data)),
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


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor as ``[first dimension, bytes]``, or ``[bytes]``; not a copy."""
    raw: Bytes = tensor.view(torch.uint8).flatten(1 if tensor.dim() > 1 else 0).numpy()
    return raw


def _ints(raw: Bytes) -> tuple[int, ...]:
    return tuple(raw.view("<i4").tolist())
