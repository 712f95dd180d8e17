"""The query tokens of an attention pass, divided into tiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

ROWS, FLAT_ROWS = 128, 64
"""Number of rows of a tile: tokens times the query heads that share a KV head. Small tiles are for flat keys."""
FLAT_FROM = 6
"""Number of small tiles that have to read a key, on average, so that copying all keys to contiguous memory pays."""
RANGE_KEYS, STEP = 512, 128
"""Number of keys up to which a tile is never split, and the alignment of key ranges."""


class Asking(NamedTuple):
    """The query tokens of one paged sequence."""

    positions: np.ndarray
    """Positions of the tokens, ``[tokens]``, ascending."""
    blocks: Sequence[int]
    """Blocks of the sequence; they cover all of ``positions``."""


class Flat(NamedTuple):
    """Copying all blocks to contiguous memory, for a pass whose tiles read each key often."""

    blocks: torch.Tensor
    """All blocks, sequence after sequence, ``[blocks]`` int64."""
    tiles: "Tiles"


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tokens in tiles of ``rows`` rows."""

    rows: int
    key_ranges: torch.Tensor
    """``[ranges, 6]`` int32: first token of the tile, its end, its sequence, first key to read, end of the keys, and
    the slot for the partial result, or -1 if the tile has no other ranges. The longest ranges come first."""
    split: torch.Tensor
    """``[tiles, 4]`` int32, for the tiles with several ranges: first token, end, first slot, end of the slots."""
    slots: int
    blocks: torch.Tensor
    """Blocks of each sequence, ``[sequences, blocks]`` int32: in the cache, or among the copies."""


@dataclass(frozen=True, eq=False)
class Queries:
    """The query tokens of a pass, in a form that all layers share."""

    positions: torch.Tensor
    """``[tokens]`` int32, for all sequences."""
    group: int
    """Query heads that share a KV head."""
    tiles: Tiles
    flat: Flat | None
    """For layers that see all keys, if copying pays."""

    @classmethod
    def of(cls, sequences: Sequence[Asking], group: int, device: torch.device, at_once: int) -> "Queries":
        """Divide the tokens of the sequences into tiles. If there are fewer tiles than ``at_once``, divide these into
        about that many key ranges of equal size."""
        assert ROWS // group, f"{group} query heads share a KV head; at most {ROWS} may"
        table = np.zeros((len(sequences), max(len(blocks) for _, blocks in sequences)), dtype=np.int32)
        for index, (_, blocks) in enumerate(sequences):
            table[index, : len(blocks)] = blocks
        positions = np.concatenate([positions for positions, _ in sequences]).astype(np.int32)
        tiles = _tiles(sequences, ROWS, group, device, at_once, table)
        return cls(_sent(positions, device), group, tiles, _flat(sequences, group, device, at_once, table))


def _flat(
    sequences: Sequence[Asking], group: int, device: torch.device, at_once: int, table: np.ndarray
) -> Flat | None:
    has_tma = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9
    if group > FLAT_ROWS or not has_tma:
        return None
    reads = int(_cover(sequences, FLAT_ROWS // group)[:, 3].sum())
    if reads < FLAT_FROM * sum(int(positions[-1]) + 1 for positions, _ in sequences):
        return None
    counts = np.array([len(blocks) for _, blocks in sequences])
    copies = (counts.cumsum() - counts)[:, None] + np.arange(table.shape[1])
    blocks = np.concatenate([np.asarray(blocks, dtype=np.int64) for _, blocks in sequences])
    # Two programs share a multiprocessor.
    return Flat(_sent(blocks, device), _tiles(sequences, FLAT_ROWS, group, device, 2 * at_once, copies))


def _tiles(
    sequences: Sequence[Asking], rows: int, group: int, device: torch.device, at_once: int, table: np.ndarray
) -> Tiles:
    key_ranges, split = _cut(_cover(sequences, rows // group), at_once)
    slots = int(split[-1, 3]) if len(split) else 0
    sent = (_sent(values.astype(np.int32), device) for values in (key_ranges, split, table))
    key_ranges_sent, split_sent, table_sent = sent
    return Tiles(rows, key_ranges_sent, split_sent, slots, table_sent)


def _cover(sequences: Sequence[Asking], size: int) -> np.ndarray:
    """Tiles of ``size`` tokens, ``[tiles, 4]``: first token, end, sequence, number of keys."""
    found, first = [], 0
    for index, (positions, _) in enumerate(sequences):
        begins = np.arange(0, len(positions), size)
        ends = np.minimum(begins + size, len(positions))
        keys = positions[ends - 1] + 1
        found.append(np.stack([first + begins, first + ends, np.full_like(begins, index), keys], axis=1))
        first += len(positions)
    return np.concatenate(found)


def _cut(tiles: np.ndarray, at_once: int) -> tuple[np.ndarray, np.ndarray]:
    """``key_ranges`` and ``split`` for ``tiles`` ``[tiles, 4]``: first token, end, sequence, number of keys."""
    keys = tiles[:, 3]
    enough = keys.max() if len(tiles) >= at_once else keys.sum() // at_once
    most = -(-max(RANGE_KEYS, int(enough)) // STEP) * STEP
    counts = -(-keys // most)
    slots = np.where(counts > 1, counts, 0)
    ends = slots.cumsum()
    split = np.stack([tiles[:, 0], tiles[:, 1], ends - slots, ends], axis=1)[counts > 1]
    tile = np.repeat(np.arange(len(tiles)), counts)
    place = np.arange(len(tile)) - (counts.cumsum() - counts)[tile]  # index among the ranges of its tile
    width = (-(-keys // (counts * STEP)) * STEP)[tile]
    first, end = place * width, np.minimum((place + 1) * width, keys[tile])
    slot = np.where(counts[tile] > 1, (ends - slots)[tile] + place, -1)
    key_ranges = np.stack([*tiles[tile, :3].T, first, end, slot], axis=1)
    return key_ranges[np.argsort(first - end, kind="stable")], split


def key_ranges_at_once(device: torch.device, kv_heads: int) -> int:
    """Number of key ranges that keep a GPU busy. Each of its multiprocessors computes one range of one KV head."""
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // kv_heads)


def _sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
