"""Splits entries into heads, and into layers of heads, and joins them again."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from kvmosaic.core.entry import ChunkKV, KVFormat
from kvmosaic.core.heads import HeadRange, HeadShare
from kvmosaic.core.key import ChunkKey
from kvmosaic.core.window import WHOLE, WindowTails
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
    encodings = [Encoding(entry.of_layers(*span), seal) for span in own_spans(heads)]
    parts = zip(product(range(heads.count), encodings), part_keys(entry.key), strict=True)
    return [partial(encoding.value, key, head, head + 1) for (head, encoding), key in parts]


def join(key: ChunkKey, parts: Sequence[DecodedEntry], block: Bytes | None) -> ChunkKV:
    """The entry of ``key``, joined from its values. Nothing is copied if their KV already are the rows of ``block``.
    Raises :class:`CorruptEntryError` if the values, each valid by itself, are not of one entry."""
    heads, first = HeadRange.parse(key.heads), parts[0]
    if heads is None:
        return first.entry(key, first.kv, first.format)
    spans = own_spans(heads)
    whole = _whole_format([part.format for part in parts[: len(spans)]], heads)
    expected = [replace(whole.of_layers(*span), heads=1) for span in spans] * heads.count
    owner = first.tokens.tobytes(), first.context.tobytes()
    if any((part.tokens.tobytes(), part.context.tobytes()) != owner for part in parts):
        raise CorruptEntryError("its values are of different entries")
    if [part.format for part in parts] != expected:
        raise CorruptEntryError(f"its values are not parts of {heads}")
    if block is None or not _are_neighbours(parts, block):
        block = POOL.take(sum(part.kv.nbytes for part in parts))
        np.concatenate([part.kv.reshape(-1) for part in parts], out=block)
    return first.entry(key, block.reshape(heads.count, -1), whole)


def own_spans(heads: HeadRange) -> list[tuple[int, int]]:
    """First and last layer of each part that is stored together, numbered in the entry."""
    return [(first - heads.first_layer, last - heads.first_layer) for first, last in heads.layer_spans]


def _whole_format(formats: Sequence[KVFormat], heads: HeadRange) -> KVFormat:
    """The format of ``heads`` in all layers, from those of one head in some layers each."""
    windowed: list[int] = []
    layers = tokens = 0
    for each in formats:
        windowed += (layers + layer for layer in each.tails.layers)
        layers, tokens = layers + each.layers, max(tokens, each.tails.tokens)
    if layers != heads.layers:
        raise CorruptEntryError(f"{layers} layers instead of {heads}")
    tails = formats[0].tails if len(formats) == 1 else WindowTails(tuple(windowed), tokens) if windowed else WHOLE
    return replace(formats[0], heads=heads.count, layers=layers, tails=tails)


def _are_neighbours(parts: Sequence[DecodedEntry], block: Bytes) -> bool:
    """Whether the KV of ``parts`` fills ``block``, in this order."""
    at = block.ctypes.data
    for part in parts:
        if part.kv.ctypes.data != at:
            return False
        at += part.kv.nbytes
    return bool(at == block.ctypes.data + block.nbytes)


class HeadGroups:
    """Collects the heads of a listing, in any order, and groups them into entries."""

    def __init__(self) -> None:
        self._sizes: dict[HeadPoolKey, dict[int, int]] = defaultdict(dict)
        """Bytes by head, for each chunk and group of layers, which the key of head 0 identifies."""

    def add(self, key: HeadPoolKey, nbytes: int) -> None:
        self._sizes[key._replace(head=0)][key.head] = nbytes

    def entries(self, share: HeadShare | None) -> Iterator[tuple[ChunkKey, int]]:
        """Keys and bytes of entries. For each chunk: the entry with the heads of ``share``, if it is complete, and
        all other heads as runs. So every head is in exactly one of them, and can be read and deleted by its key."""
        left = {group: dict(sizes) for group, sizes in self._sizes.items()}
        if share is not None:
            own = range(share.heads.first, share.heads.last + 1)
            spans = share.heads.layer_spans
            for group in self._sizes:
                if (group.heads, group.first_layer, group.last_layer) != (share.heads.total, *spans[0]):
                    continue
                parts = [left.get(group._replace(first_layer=span[0], last_layer=span[1]), {}) for span in spans]
                if all(head in sizes for sizes in parts for head in own):
                    nbytes = sum(sizes.pop(head) for sizes in parts for head in own)
                    yield replace(group.entry_key, heads=str(share.heads)), nbytes
        for group, sizes in left.items():
            for run in _runs(sizes):
                heads = HeadRange(run[0], run[-1], group.heads, group.first_layer, group.last_layer)
                yield replace(group.entry_key, heads=str(heads)), sum(sizes[head] for head in run)


def _runs(heads: Iterable[int]) -> list[range]:
    """Heads grouped into runs of consecutive ones."""
    runs: list[range] = []
    for head in sorted(heads):
        if runs and runs[-1].stop == head:
            runs[-1] = range(runs[-1].start, head + 1)
        else:
            runs.append(range(head, head + 1))
    return runs
