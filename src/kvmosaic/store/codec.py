"""An entry as safetensors bytes: tensors ``tokens``, ``context`` and ``kv``, checksums in the metadata.

The same bytes are a file on disk and a value in a remote store. Any safetensors reader can open them and slice
``kv`` by heads. The safetensors library itself is not used here, because its functions copy all KV once more or map
the file. A mapped file could change after it was verified, and truncating it would end the process with a bus error.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvmosaic.core.entry import ChunkKV, EntryKind, KVFormat
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.limits import shown
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.header import DTYPE_NAMES, FORMAT_NAME, Source, check_format, format_fields, read_header
from kvmosaic.store.memory import Bytes
from kvmosaic.store.seal import HEX_DIGITS, EntryCheck, Seal, hexdigest, is_same

ALIGNMENT = 64
"""Alignment of the KV, in bytes."""
NO_CHECKSUM = "0" * HEX_DIGITS


def encode(entry: ChunkKV, seal: Seal) -> list[memoryview]:
    """The bytes of ``entry``, see :meth:`Encoding.value`."""
    return Encoding(entry, seal).value(str(entry.key), 0, entry.format.heads)


class Encoding:
    """An entry about to be written, as a whole or head by head. Parts that its values share are made once."""

    def __init__(self, entry: ChunkKV, seal: Seal) -> None:
        data = entry.data.cpu().contiguous()
        self.kv = _bytes_of(data)
        """``[heads, bytes]``."""
        self._seal = seal
        self._dtype, self._numbers = DTYPE_NAMES[data.dtype], data.shape[1]
        self._tokens = np.asarray(entry.tokens, "<i4").view(np.uint8)
        self._context = np.asarray(entry.context, "<i4").view(np.uint8)
        self._fields = {"format": FORMAT_NAME, **format_fields(entry.format)}
        if entry.kind is not None:
            self._fields["kind"] = entry.kind

    def value(self, key: str, first: int, end: int) -> list[memoryview]:
        """Heads from ``first`` up to, but not including, ``end`` as the entry of ``key``. Two consecutive parts: the
        header with the small tensors, and the KV, which is not copied if it is contiguous in host memory."""
        kv = self.kv[first:end]
        return [memoryview(self.small(key, self._seal.heads(kv))), kv.reshape(-1).data]

    def small(self, key: str, head_checksums: Sequence[str]) -> bytes:
        """The bytes before the KV, for as many heads as checksums. Their number does not depend on the checksums."""
        heads, tokens, context = len(head_checksums), self._tokens, self._context
        fields = {**self._fields, "key": key, "heads": str(heads), "head_checksums": " ".join(head_checksums)}
        fields["checksum"] = _checksum(self._seal, fields, tokens, context)
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
        # Trailing spaces are part of the format. They align the KV, which is used in the memory it was received in.
        text += b" " * (-(8 + len(text) + tokens.nbytes + context.nbytes) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text + tokens.tobytes() + context.tobytes()


def max_file_bytes(entry: ChunkKV) -> int:
    """Upper bound of the file size of ``entry``, in bytes."""
    small = 4 * (len(entry.tokens) + len(entry.context))
    return entry.nbytes + small + max_header_bytes(str(entry.key), entry.format)


def max_header_bytes(key: str, kv_format: KVFormat) -> int:
    """Upper bound of the bytes before the tensors of an entry."""
    longest_key = 2 * len(key)  # JSON escapes at most double the length of a quoted key
    return longest_key + (HEX_DIGITS + 1) * kv_format.heads + 4 * kv_format.layers + 1024


class DecodedEntry(NamedTuple):
    """The verified contents of a value."""

    tokens: Bytes
    context: Bytes
    format: KVFormat
    kv: Bytes
    """``[heads, bytes]``."""
    kind: EntryKind | None = None

    def entry(self, key: ChunkKey, kv: Bytes, kv_format: KVFormat) -> ChunkKV:
        """The entry of ``key`` with ``kv``, maybe of more heads and layers; raises :class:`CorruptEntryError` if
        invalid."""
        try:
            data = torch.from_numpy(kv).view(kv_format.stored_dtype)
            return ChunkKV(key, _ints(self.tokens), _ints(self.context), kv_format, data, self.kind)
        except ValueError as error:
            raise CorruptEntryError(str(error)) from error


def decode(value: Sequence[Bytes], key: str, check: EntryCheck) -> DecodedEntry:
    """Verify that ``value``, given as consecutive parts, is the entry of ``key``. The result shares its memory,
    except for tensors that span several parts. Raises :class:`CorruptEntryError` if anything differs."""
    return decode_from(_Memory(value), key, check)


class HeadSource(Source, Protocol):
    """A source that reads heads and computes their checksums in one go."""

    def read_heads(self, first: int, last: int, heads: int, seal: Seal) -> tuple[Bytes, list[str]]:
        """``[heads, bytes]``, and the checksum of each."""


def decode_from(source: HeadSource, key: str, check: EntryCheck) -> DecodedEntry:
    """:func:`decode` from any source."""
    try:
        return _read(source, key, check)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptEntryError(str(error)[:500] or repr(error)) from error


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

    def read_heads(self, first: int, last: int, heads: int, seal: Seal) -> tuple[Bytes, list[str]]:
        kv = self.read(first, last).reshape(heads, -1)
        return kv, seal.heads(kv)


def _read(source: HeadSource, key: str, check: EntryCheck) -> DecodedEntry:
    own = check.format
    header = read_header(source) if own is None else read_header(source, max_header_bytes(key, own))
    fields = header.fields
    if fields["key"] != key:
        raise ValueError(f"holds the entry of another key, {shown(fields['key'])}")
    kv_format = check_format(header, int(key.rpartition("@")[2]), own)
    tokens, context = source.read(*header.tokens), source.read(*header.context)
    if not is_same(fields.pop("checksum"), _checksum(check.seal, fields, tokens, context)):
        raise ValueError("the checksum of key, tokens, context and format does not match")
    kv, checksums = source.read_heads(*header.kv, kv_format.heads, check.seal)
    if not is_same(fields["head_checksums"], " ".join(checksums)):
        raise ValueError("the checksum of a head does not match")
    return DecodedEntry(tokens, context, kv_format, kv, header.kind)


def _checksum(seal: Seal, fields: dict[str, str], tokens: Bytes, context: Bytes) -> str:
    """Checksum of everything except the heads' bytes, whose own checksums are in ``fields``."""
    digest = seal.for_entry()
    digest.update(memoryview(json.dumps([fields, len(tokens), len(context)], sort_keys=True).encode()))
    digest.update(tokens.data)
    digest.update(context.data)
    return hexdigest(digest)


def _bytes_of(data: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor as ``[first dimension, bytes]``; not a copy."""
    raw: Bytes = data.view(torch.uint8).flatten(1).numpy()
    return raw


def _ints(raw: Bytes) -> tuple[int, ...]:
    return tuple(raw.view("<i4").tolist())
