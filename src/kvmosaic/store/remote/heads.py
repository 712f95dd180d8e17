"""Entries taken apart into heads, and put together again."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import HeadRange, HeadShare
from kvmosaic.core.key import ChunkKey
from kvmosaic.store.base import CorruptEntryError
from kvmosaic.store.memory import POOL, Bytes
from kvmosaic.store.remote.base import RefusedError
from kvmosaic.store.remote.keys import HeadPoolKey, part_keys


def split(entry: ChunkKV) -> list[ChunkKV]:
    """One entry for each value that ``entry`` is stored as; nothing is copied."""
    heads = HeadRange.parse(entry.key.heads)
    if heads is None:
        return [entry]
    if (heads.count, heads.layers) != (entry.format.heads, entry.format.layers):
        raise RefusedError(f"an entry of {entry.format.heads} heads and {entry.format.layers} layers as {heads}")
    one = replace(entry.format, heads=1)
    return [
        ChunkKV(key, entry.tokens, entry.context, one, entry.data[index : index + 1])
        for index, key in enumerate(part_keys(entry.key))
    ]


def join(key: ChunkKey, parts: Sequence[ChunkKV], block: Bytes | None) -> ChunkKV:
    """The entry of ``key`` from what :func:`split` made of it. Nothing is copied if their KV already are the rows of
    ``block``. Raises :class:`CorruptEntryError` when the parts, each of them sound, are not of one entry."""
    heads, first = HeadRange.parse(key.heads), parts[0]
    if heads is None:
        return first
    if first.format.layers != heads.layers or first.format.heads != 1:
        raise CorruptEntryError(
            f"{first.format.heads} heads and {first.format.layers} layers instead of one of {heads}"
        )
    if any((part.tokens, part.context, part.format) != (first.tokens, first.context, first.format) for part in parts):
        raise CorruptEntryError("its heads are of different entries")
    in_place = block is not None and [part.data.data_ptr() for part in parts] == [row.ctypes.data for row in block]
    memory = block if block is not None and in_place else POOL.take(len(parts) * first.nbytes).reshape(len(parts), -1)
    data = torch.from_numpy(memory).view(first.format.dtype)
    if not in_place:
        torch.cat([part.data for part in parts], out=data)
    return ChunkKV(key, first.tokens, first.context, replace(first.format, heads=len(parts)), data)


class HeadGroups:
    """Collects the heads that a listing names in any order, and says which entries they make up."""

    def __init__(self) -> None:
        self._sizes: dict[HeadPoolKey, dict[int, int]] = defaultdict(dict)
        """Bytes by head, for what head 0 of the same chunk and layers is called."""

    def add(self, key: HeadPoolKey, nbytes: int) -> None:
        self._sizes[key._replace(head=0)][key.head] = nbytes

    def entries(self, share: HeadShare | None) -> Iterator[tuple[ChunkKey, int]]:
        """Keys and bytes: of each chunk the entry that ``share`` calls its own, if all of it is there, and all other
        heads as runs. So every head is in exactly one of them, and can be read and deleted by its key."""
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
    """Heads as runs of consecutive ones."""
    runs: list[range] = []
    for head in sorted(heads):
        if runs and runs[-1].stop == head:
            runs[-1] = range(runs[-1].start, head + 1)
        else:
            runs.append(range(head, head + 1))
    return runs
