"""Splits entries into heads and joins them again."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import HeadRange, HeadShare
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.codec import DecodedEntry, Encoding, encode
from kvmosaic.store.memory import POOL, Bytes
from kvmosaic.store.remote.base import RefusedError
from kvmosaic.store.remote.keys import HeadPoolKey, part_keys
from kvmosaic.store.seal import Seal


def values_of(entry: ChunkKV, seal: Seal) -> list[Callable[[], list[memoryview]]]:
    """Functions that make the values that ``entry`` is stored as."""
    heads = HeadRange.parse(entry.key.heads)
    if heads is None:
        return [partial(encode, entry, seal)]
    if (heads.count, heads.layers) != (entry.format.heads, entry.format.layers):
        raise RefusedError(
            f"an entry of {entry.format.heads} heads and {entry.format.layers} layers does not match its key, {heads}"
        )
    encoding = Encoding(entry, seal)
    return [partial(encoding.value, key, head, head + 1) for head, key in enumerate(part_keys(entry.key))]


def join(key: ChunkKey, parts: Sequence[DecodedEntry], block: Bytes | None) -> ChunkKV:
    """The entry of ``key``, joined from its values. Nothing is copied if their KV already are the rows of ``block``.
    Raises :class:`CorruptEntryError` if the values, each valid by itself, are not of one entry."""
    heads, first = HeadRange.parse(key.heads), parts[0]
    if heads is None:
        return first.entry(key, first.kv)
    if first.format.layers != heads.layers or first.format.heads != 1:
        raise CorruptEntryError(
            f"{first.format.heads} heads and {first.format.layers} layers instead of one head of {heads}"
        )
    owner = first.tokens.tobytes(), first.context.tobytes(), first.format
    if any((part.tokens.tobytes(), part.context.tobytes(), part.format) != owner for part in parts):
        raise CorruptEntryError("its heads are of different entries")
    if block is None or any(part.kv.ctypes.data != row.ctypes.data for part, row in zip(parts, block, strict=True)):
        block = POOL.take(sum(part.kv.nbytes for part in parts)).reshape(len(parts), -1)
        np.concatenate([part.kv for part in parts], out=block)
    return first.entry(key, block)


class HeadGroups:
    """Collects the heads of a listing, in any order, and groups them into entries."""

    def __init__(self) -> None:
        self._sizes: dict[HeadPoolKey, dict[int, int]] = defaultdict(dict)
        """Bytes by head, for each chunk and layers, which the key of their head 0 stands for."""

    def add(self, key: HeadPoolKey, nbytes: int) -> None:
        self._sizes[key._replace(head=0)][key.head] = nbytes

    def entries(self, share: HeadShare | None) -> Iterator[tuple[ChunkKey, int]]:
        """Keys and bytes of entries. For each chunk: the entry with the heads of ``share``, if it is complete, and
        all other heads as runs. So every head is in exactly one of them, and can be read and deleted by its key."""
        for group, sizes in self._sizes.items():
            runs = _runs(sizes)
            if share is not None and _is_of(group, share.heads):
                own = range(share.heads.first, share.heads.last + 1)
                if all(head in sizes for head in own):
                    runs = [own, *_runs(sizes.keys() - set(own))]
            for run in runs:
                heads = HeadRange(run[0], run[-1], group.heads, group.first_layer, group.last_layer)
                yield replace(group.entry_key, heads=str(heads)), sum(sizes[head] for head in run)


def _is_of(group: HeadPoolKey, heads: HeadRange) -> bool:
    here = group.heads, group.first_layer, group.last_layer
    return here == (heads.total, heads.first_layer, heads.last_layer)


def _runs(heads: Iterable[int]) -> list[range]:
    """Heads grouped into runs of consecutive ones."""
    runs: list[range] = []
    for head in sorted(heads):
        if runs and runs[-1].stop == head:
            runs[-1] = range(runs[-1].start, head + 1)
        else:
            runs.append(range(head, head + 1))
    return runs
