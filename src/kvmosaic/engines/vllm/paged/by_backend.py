"""Copying entries into vLLM's blocks and out of them through the backend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvmosaic.blend.base import KVPart
from kvmosaic.core.accelerator import may_copy_later
from kvmosaic.core.entry import ChunkKV, KVFormat, PackedKV
from kvmosaic.core.rotation import CosSin, rotate_
from kvmosaic.engines.rotary import LayerRotary, turns_for
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.engines.vllm.paged.base import RequestBlocks, RunRange
from kvmosaic.engines.vllm.paged.layout_probe import BlockReader
from kvmosaic.engines.vllm.paged.pair_reader import PairReader


@dataclass(frozen=True, eq=False)
class _Kept:
    """The tokens of some entries that a layer keeps."""

    tokens: torch.Tensor
    """Their indices among the tokens of all entries, ``[kept]``."""
    skipped: int
    """Number of first tokens that are not written."""
    positions: torch.Tensor
    """Positions of the other tokens, ``[kept - skipped]``."""

    @classmethod
    def of(cls, moves: Sequence[tuple[ChunkKV, int]], counts: Sequence[int], start: int) -> "_Kept":
        """The last ``counts`` tokens of each entry. Tokens at positions below ``start`` are not written."""
        tokens, positions, end = [], [], 0
        for (entry, at), count in zip(moves, counts, strict=True):
            end, last = end + len(entry.tokens), at + len(entry.tokens)
            tokens.append(torch.arange(end - count, end))
            positions.append(torch.arange(last - count, last))
        places = torch.cat(positions)
        skipped = int((places < start).sum())  # positions ascend
        return cls(torch.cat(tokens), skipped, places[skipped:])


class BackendBlocks(RequestBlocks):
    """Works with any backend: uses torch operations, the backend's own writer, and hooks that see KV before it is
    packed."""

    def __init__(
        self,
        forward: SparseForward,
        rotary: Sequence[LayerRotary | None],
        kv_format: KVFormat,
        reader: BlockReader | PairReader | None,
    ) -> None:
        self._forward = forward
        self.format = kv_format
        self._rotary = rotary
        self._reader = reader

    def place(self, moves: Sequence[tuple[ChunkKV, int]], blocks: Sequence[Sequence[int]], start: int) -> None:
        if not moves:
            return
        self.check_formats(moves)
        kv, windowed = self._forward.kv, self.tails.layers
        # vLLM's tables do not depend on a prompt's length.
        turns = turns_for(moves, 0, self._rotary)
        moved = [replace(entry, data=_on(kv.device, entry.data)) for entry, _ in moves]
        everything = _Kept.of(moves, [len(entry.tokens) for entry, _ in moves], start)
        tail = _Kept.of(moves, [min(len(entry.tokens), self.tails.tokens) for entry, _ in moves], start)
        slots = {kept: kv.slots(kept.positions.to(kv.device), blocks) for kept in (everything, tail)}
        for index, layer in enumerate(kv.kept):
            kept = tail if index in windowed else everything
            # [heads, tokens, dim] of all entries
            k, v = (torch.cat(rows, dim=1) for rows in zip(*(entry.layer(index) for entry in moved), strict=True))
            turn = turns[index]
            if turn is not None:
                angles = CosSin(*(rows[kept.tokens.to(rows.device)] for rows in turn.turn))
                rotate_(k if turn.columns.part == "k" else v, angles, turn.columns)
            # [tokens, heads, dim], as backends take it
            k, v = (rows[:, kept.skipped :].transpose(0, 1).contiguous() for rows in (k, v))
            kv.write(layer, k, v, slots[kept])

    def reused(
        self,
        moves: Sequence[tuple[ChunkKV, int]],
        blocks: Sequence[Sequence[int]],
        layers: Sequence[int],
        part: KVPart,
    ) -> Iterator[torch.Tensor]:
        # Read from the entries, because only the backend knows how blocks are packed.
        which = 0 if part == "k" else 1
        turns = turns_for(moves, 0, [self._rotary[layer] for layer in layers])
        for layer, turn in zip(layers, turns, strict=True):
            rows = torch.cat([entry.layer(layer)[which].to(self._forward.kv.device) for entry, _ in moves], dim=1)
            if turn is not None and turn.columns.part == part:
                rotate_(rows, turn.turn, turn.columns)
            yield rows

    @property
    def can_read(self) -> bool:
        return self._reader is not None

    def read(self, blocks: Sequence[int], start: int, end: int, form: KVFormat) -> PackedKV:
        assert self._reader is not None
        return PackedKV.of(*self._reader.read(blocks, start, end), form)

    def compute(
        self, runs: Sequence[Run], ranges: Sequence[RunRange] = (), form: KVFormat | None = None
    ) -> list[PackedKV]:
        if not ranges:
            self._forward.run(runs)
            return []
        k, v = self._forward.capture(runs)
        begins = [0]
        for run in runs:
            begins.append(begins[-1] + len(run.tokens))
        results = []
        for each in ranges:
            offset = begins[each.run] - runs[each.run].start
            inside = slice(offset + each.start, offset + each.end)
            # [layers, tokens, heads, dim] -> [heads, layers, tokens, dim]
            own_k, own_v = (part[:, inside].permute(2, 0, 1, 3) for part in (k, v))
            results.append(PackedKV.of(own_k, own_v, form or self.format))
        return results


def _on(device: torch.device, data: torch.Tensor) -> torch.Tensor:
    return data.to(device, non_blocking=may_copy_later(data, device))
