"""Files of an attacker who knows the format and can write to the store, but has no store key."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from kvmosaic.core.entry import ChunkKV


def fields_of(entry: ChunkKV) -> dict[str, Any]:
    """Header fields of ``entry``, without the checksums."""
    kv_format = entry.format
    return {
        "format": "kvmosaic-entry-2",
        "layers": str(kv_format.layers),
        "k_dim": str(kv_format.k_dim),
        "v_dim": str(kv_format.v_dim),
        "dtype": str(kv_format.dtype).removeprefix("torch."),
        "windowed": " ".join(map(str, kv_format.tails.layers)),
        "tail": str(kv_format.tails.tokens),
        "key": str(entry.key),
        "heads": str(kv_format.heads),
        **({"numbers": kv_format.numbers} if kv_format.is_int8 else {}),
    }


def forged(
    entry: ChunkKV,
    fields: dict[str, Any] | None = None,
    *,
    tokens: Sequence[int] | None = None,
    kv: bytes | None = None,
    header: dict[str, Any] | None = None,
) -> bytes:
    """A file for the key of ``entry`` in which everything that is not given is right, including checksums.
    ``header`` replaces parts of the header itself."""
    data = entry.data.contiguous().view(torch.uint8).numpy()
    said = fields_of(entry) | (fields or {})
    content = data.tobytes() if kv is None else kv
    heads = len(data) if kv is None else 1
    size = len(content) // heads
    dtype = "I8" if entry.format.is_int8 else "BF16"
    parts = [content[index * size : (index + 1) * size] for index in range(heads)]
    said.setdefault("head_checksums", " ".join(xxhash.xxh3_128_hexdigest(part) for part in parts))
    ids, context = (
        np.asarray(numbers, "<i4").tobytes()
        for numbers in (entry.tokens if tokens is None else tokens, entry.context)
    )
    digest = xxhash.xxh3_128(json.dumps([said, len(ids), len(context)], sort_keys=True).encode())
    digest.update(ids)
    digest.update(context)
    ends = [len(ids), len(ids) + len(context), len(ids) + len(context) + len(content)]
    every: dict[str, Any] = {
        "__metadata__": said | {"checksum": digest.hexdigest()},
        "tokens": {"dtype": "I32", "shape": [len(ids) // 4], "data_offsets": [0, ends[0]]},
        "context": {"dtype": "I32", "shape": [len(context) // 4], "data_offsets": [ends[0], ends[1]]},
        "kv": {"dtype": dtype, "shape": [heads, size // entry.data.itemsize], "data_offsets": [ends[1], ends[2]]},
    } | (header or {})
    text = json.dumps(every).encode()
    return len(text).to_bytes(8, "little") + text + ids + context + content
