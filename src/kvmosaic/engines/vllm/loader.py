"""Worker side: find or fill a request's chunks, remap them into its blocks, compute what is fresh."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvmosaic.blend import policy_for_ratio
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.entry import VIRTUAL_POS_START, ChunkKV
from kvmosaic.core.key import format_fingerprint
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.rotation import rotate_
from kvmosaic.engines.chunk_cache import ChunkCache
from kvmosaic.engines.rotary import LayerRotary, explain_layer, turns_for
from kvmosaic.engines.vllm.rotary import find_tables
from kvmosaic.engines.vllm.scheduler import ChunkLoad
from kvmosaic.engines.vllm.sparse import Row, SparseForward

SCRATCH_BYTES = 512 * 1024**2
"""Most bytes of KV that a remap holds between entries and blocks."""


class ChunkLoader:
    """Brings the KV of requests' chunks into their blocks."""

    def __init__(
        self,
        config: ChunkCacheConfig,
        model: str,
        identity: dict[str, object],
        sink: Sequence[int],
        parser: ChunkTokenParser,
        forward: SparseForward,
        network: torch.nn.Module,
        device_pool: torch.Tensor | None,
    ) -> None:
        self._config = config
        self._forward = forward
        self._scratch: Sequence[Sequence[int]] = [range(1, 9) for _ in forward.block_sizes]  # block 0 is never used
        self._rotary = self._measure(network)
        self._fingerprint = format_fingerprint(
            columns=[rotary.columns if rotary else None for rotary in self._rotary],
            **identity,
        )
        self.cache = ChunkCache(config, model, sink, parser, self, None, device_pool)

    def fingerprint(self, length: int) -> str:
        """The same for every prompt: vLLM's rotary tables do not depend on its length."""
        return self._fingerprint

    def load(self, load: ChunkLoad) -> None:
        """Bring positions ``load.first`` up to the question of one request into its blocks."""
        prompt, forward = load.prompt, self._forward
        context = self.cache.context_of(prompt)
        skip = [load.first // size for size in forward.block_sizes]
        self._scratch = [row[start:] for row, start in zip(load.blocks, skip, strict=True)]
        room = min(len(row) * size for row, size in zip(self._scratch, forward.block_sizes, strict=True))
        wanted = [span for span in prompt.chunks if span.end > load.first]
        length = len(prompt.token_ids)
        # A chunk that has to be filled needs room beside what vLLM's prefix cache already holds of the prompt.
        roomy = [span for span in wanted if len(context) + len(span) <= room]
        found = self.cache.find_or_fill([prompt.tokens_of(span) for span in roomy], context, length)
        entries = {span: item.entry for span, item in zip(roomy, found, strict=True)}
        for span in wanted:
            if span not in entries:
                tokens = prompt.tokens_of(span)
                stored = self.cache.store.lookup(self.cache.key(tokens, context, length), tokens, context).entry
                if stored is not None:
                    entries[span] = stored
        usable = [span for span in wanted if span in entries]
        self._place([(entries[span], span.start) for span in usable], load)
        reused = type(prompt)(prompt.token_ids, tuple(usable))
        blended = policy_for_ratio(load.ratio)(reused)
        end = prompt.question.start
        positions = sorted(p for p in {*reused.fresh_positions(), *blended} if load.first <= p < end)
        forward.run([Row(prompt.token_ids[a:b], a, load.blocks) for a, b in _runs(positions)])

    def _place(self, moves: Sequence[tuple[ChunkKV, int]], load: ChunkLoad) -> None:
        """Remap entries to their positions, all of a request together: a few operations for a few layers at once,
        not for every chunk and layer. Positions below ``load.first`` are in blocks that others may share."""
        if not moves:
            return
        forward, kv_format = self._forward, moves[0][0].format
        turns = turns_for(moves, len(load.prompt.token_ids), self._rotary)
        positions = torch.cat([torch.arange(at, at + len(entry.tokens)) for entry, at in moves])
        keep = slice(int((positions < load.first).sum()), None)  # they ascend
        slots = forward.slots(positions[keep].to(forward.device), load.blocks)
        sources = [entry.data.to(forward.device, non_blocking=True) for entry, _ in moves]
        moved = [replace(entry, data=data) for (entry, _), data in zip(moves, sources, strict=True)]
        count = len(positions)
        step = max(1, SCRATCH_BYTES // (count * kv_format.bytes_per_token // kv_format.layers))
        for first in range(0, kv_format.layers, step):
            layers = slice(first, first + step)
            # [layers, tokens, heads, dim], as backends take it
            k, v = (
                torch.cat([part(entry)[:, layers].permute(1, 2, 0, 3) for entry in moved], dim=1)
                for part in (lambda entry: entry.k, lambda entry: entry.v)
            )
            for index, layer in enumerate(forward.layers[layers]):
                rows = {"k": k[index], "v": v[index]}
                turn = turns[first + index]
                if turn is not None:
                    rotate_(rows[turn.columns.part].transpose(0, 1), turn.turn, turn.columns)
                forward.write(layer, rows["k"][keep], rows["v"][keep], slots)

    def fill(
        self, context: Sequence[int], chunks: Sequence[Sequence[int]], length: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Canonical KV of each chunk, in the request's own blocks as scratch space: they are written anew after."""
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        batch: list[Row] = []
        used = [0] * len(self._scratch)

        def run_batch() -> None:
            k, v = self._forward.capture(batch)
            at = 0
            for row in batch:
                inside = slice(at + len(context), at + len(row.tokens))
                # [layers, tokens, heads, dim] -> [heads, layers, tokens, dim]
                results.append((k[:, inside].permute(2, 0, 1, 3), v[:, inside].permute(2, 0, 1, 3)))
                at += len(row.tokens)
            batch.clear()

        for chunk in chunks:
            tokens = [*context, *chunk]
            need = [-(-len(tokens) // size) for size in self._forward.block_sizes]
            if any(u + n > len(row) for u, n, row in zip(used, need, self._scratch, strict=True)):
                run_batch()
                used = [0] * len(self._scratch)
            blocks = [row[u : u + n] for row, u, n in zip(self._scratch, used, need, strict=True)]
            batch.append(Row(tokens, VIRTUAL_POS_START, blocks))
            used = [u + n for u, n in zip(used, need, strict=True)]
        run_batch()
        return results

    def _measure(self, network: torch.nn.Module) -> list[LayerRotary | None]:
        """Compute the same tokens at two places and explain what changed, layer by layer."""
        tokens = list(range(3, 15))
        old, new = range(len(tokens)), range(29, 29 + len(tokens))
        row = Row(tokens, 0, self._scratch)
        at_old, at_new = self._forward.capture([row]), self._forward.capture([row], shift=new.start)
        tables = find_tables(network)
        return [
            explain_layer(
                layer,
                (at_old[0][layer].transpose(0, 1), at_old[1][layer].transpose(0, 1)),
                (at_new[0][layer].transpose(0, 1), at_new[1][layer].transpose(0, 1)),
                old,
                new,
                tables,
            )
            for layer in range(len(self._forward.layers))
        ]


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as ``(start, end)`` runs."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs
