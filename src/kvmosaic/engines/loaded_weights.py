"""Identifies the weights that a model has in memory by some pieces of every tensor. This is cheap enough to be
repeated whenever they may have changed."""

from collections.abc import Iterable
from functools import lru_cache

import torch
import xxhash

PIECE_BYTES = 512
"""Bytes of one piece. In memory that is mapped page by page, every place costs as much as many bytes."""
_JITTER = 40503
"""Step of the offsets added to evenly spaced places, which would otherwise all be in a few columns."""


def sampled_digest(tensors: Iterable[tuple[str, torch.Tensor]], sample_bytes: int) -> str | None:
    """Digest of the names, shapes, types and up to ``sample_bytes`` bytes of each of ``tensors``; ``None`` if none of
    them has data."""
    digest = xxhash.xxh3_128()
    on_gpus: dict[torch.device, list[torch.Tensor]] = {}
    is_empty = True
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.shape} {tensor.dtype}\n".encode())
        if not tensor.numel() or tensor.is_meta:
            continue
        is_empty = False
        stored = _in_memory(tensor.data)
        size, count = len(stored), sample_bytes // PIECE_BYTES
        if stored.device.type != "cpu":
            part = stored if size <= sample_bytes else stored[_places(size, count, stored.device)]
            on_gpus.setdefault(stored.device, []).append(part)
        elif size <= sample_bytes:
            digest.update(stored.numpy().data)
        else:
            flat = stored.numpy().data
            for start in _starts(size, count):
                digest.update(flat[start : start + PIECE_BYTES])
    for parts in on_gpus.values():  # one transfer per GPU: each is waited for
        digest.update(torch.cat(parts).cpu().numpy().data)
    return None if is_empty else digest.hexdigest()


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, ``[bytes]`` uint8, in their order in memory. In any other order, flattening a transposed
    matrix would copy all of it."""
    if not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
    return tensor.reshape(-1).view(torch.uint8)


@lru_cache(maxsize=1024)
def _starts(size: int, count: int) -> list[int]:
    """Starts of ``count`` pieces of a tensor of ``size`` bytes, one in each of as many equal parts."""
    part = size // count
    return [index * part + index * _JITTER % (part - PIECE_BYTES + 1) for index in range(count)]


@lru_cache(maxsize=256)
def _places(size: int, count: int, device: torch.device) -> torch.Tensor:
    """The places of all bytes of the pieces from :func:`_starts`."""
    starts = torch.tensor(_starts(size, count), device=device)
    return (starts[:, None] + torch.arange(PIECE_BYTES, device=device)).view(-1)
