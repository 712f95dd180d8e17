"""The sparse forward: compute any subset of paged sequences' tokens with vLLM's own model and backend.

Every run of consecutive tokens becomes a *virtual sequence*: its own row of query offsets and lengths over
the block table of the sequence it belongs to. vLLM writes the K and V of all rows before attention reads, so
each token sees exactly the positions at or before its own: fresh where selected, cached elsewhere.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from vllm.forward_context import set_forward_context

from kvmosaic.engines.vllm.compat import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    init_attn_backend,
    no_adapters,
    write_rows,
)


class Row(NamedTuple):
    """A run of consecutive tokens of one paged sequence."""

    tokens: Sequence[int]
    start: int
    """Position of the first token."""
    blocks: Sequence[Sequence[int]]
    """The sequence's block ids, per KV cache group; they cover positions ``0 .. start + len(tokens) - 1``."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


class _Enough(Exception):
    """A probe has seen what it wanted to see."""


class SparseForward:
    """Runs rows through the model, in as many passes as the engine's limits ask for."""

    def __init__(self, vllm_config: Any, runner: Any, kv_cache_config: Any) -> None:
        self._config = vllm_config
        self._runner = runner
        # Own metadata builders: the runner's share buffers with the step in progress.
        self._kv_cache_config = copy.deepcopy(kv_cache_config)
        self._groups, _, _ = init_attn_backend(self._kv_cache_config, vllm_config, runner.device)
        self.block_sizes = [group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups]
        context = vllm_config.compilation_config.static_forward_context
        names = [name for group in self._kv_cache_config.kv_cache_groups for name in group.layer_names]
        self.layers: list[Any] = [context[name] for name in sorted(names, key=_layer_index)]
        """The attention layers, first to last."""
        self._group_of = {
            name: index
            for index, group in enumerate(self._kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }

    @property
    def device(self) -> torch.device:
        return self._runner.device

    def run(self, rows: Sequence[Row]) -> None:
        """Compute all rows. Rows of one sequence come in ascending order, so that passes build on each other."""
        for batch in self._passes(rows):
            self._forward(batch)

    def outputs(self, rows: Sequence[Row], shift: int = 0) -> torch.Tensor:
        """Compute all rows as :meth:`run` does and return the last hidden states ``[tokens, hidden]``. With ``shift``
        the model is told positions that much higher."""
        return torch.cat([self._forward(batch, shift) for batch in self._passes(rows)])

    def capture(self, rows: Sequence[Row], shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute all rows and return the K and V they cache: ``[layers, tokens, heads, dim]`` each, keys rotated.
        With ``shift`` the model is told positions that much higher, while rows see the same keys."""
        parts = []
        for batch in self._passes(rows):
            with self._recording() as recorded:
                self._forward(batch, shift, hooked=True)
            parts.append([torch.stack([recorded[layer.layer_name][i] for layer in self.layers]) for i in (0, 1)])
        k, v = (torch.cat([part[i] for part in parts], dim=1) for i in (0, 1))
        return k, v

    def probe(self, rows: Sequence[Row], layer: int, observe: Observer) -> None:
        """Compute rows no further than the K and V of ``layer``, which are written, too. ``observe`` is told, pass
        by pass, each layer's index, queries ``[tokens, heads, dim]``, K and V ``[tokens, kv_heads, dim]``."""
        index_of = {each.layer_name: index for index, each in enumerate(self.layers)}
        slots: list[torch.Tensor] = []

        def note(module: Any, inputs: tuple[Any, ...]) -> None:
            index = index_of[module.layer_name]
            q, k, v = inputs[:3]
            q = q.reshape(-1, module.num_heads, module.head_size)
            k, v = (
                k.reshape(-1, module.num_kv_heads, module.head_size),
                v.reshape(-1, module.num_kv_heads, module.head_size_v),
            )
            observe(index, q, k, v)
            if index == layer:
                self.write(module, k, v, slots)
                raise _Enough

        handles = [each.register_forward_pre_hook(note) for each in self.layers[: layer + 1]]
        try:
            for batch in self._passes(rows):
                parts = [
                    self.slots(torch.arange(row.start, row.end, device=self.device), row.blocks) for row in batch
                ]
                slots[:] = [torch.cat(group) for group in zip(*parts, strict=True)]
                with suppress(_Enough):
                    self._forward(batch, hooked=True)
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Layers whose attention reaches every earlier token."""
        return tuple(
            index for index, layer in enumerate(self.layers) if getattr(layer, "sliding_window", None) is None
        )

    @cached_property
    def windowed_layers(self) -> tuple[int, ...]:
        """Layers with a sliding window."""
        return tuple(index for index in range(len(self.layers)) if index not in self.full_layers)

    def write(self, layer: Any, k: torch.Tensor, v: torch.Tensor, slots: Sequence[torch.Tensor]) -> None:
        """Store K and V ``[tokens, heads, dim]`` of one layer; the backend packs them as it likes."""
        write_rows(layer, k, v, slots[self._group_of[layer.layer_name]])

    def slots(self, positions: torch.Tensor, blocks: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Slot of each position ``[tokens]`` of a sequence, per KV cache group."""
        tables = [torch.tensor(row, dtype=torch.long, device=self.device) for row in blocks]
        return [
            table[positions // size] * size + positions % size
            for table, size in zip(tables, self.block_sizes, strict=True)
        ]

    def _passes(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Cut rows into passes within the engine's limits on tokens and sequences."""
        scheduler = self._config.scheduler_config
        room = scheduler.max_num_batched_tokens
        batch: list[Row] = []
        for row in rows:
            rest = row
            while rest.tokens:
                if room == 0 or len(batch) == scheduler.max_num_seqs:
                    yield batch
                    room, batch = scheduler.max_num_batched_tokens, []
                piece = Row(rest.tokens[:room], rest.start, rest.blocks)
                batch.append(piece)
                room -= len(piece.tokens)
                rest = Row(rest.tokens[len(piece.tokens) :], piece.end, rest.blocks)
        if batch:
            yield batch

    def _forward(self, rows: Sequence[Row], shift: int = 0, hooked: bool = False) -> torch.Tensor:
        """One pass; the last hidden states ``[tokens, hidden]``."""
        device = self.device
        lengths = [len(row.tokens) for row in rows]
        positions = torch.cat([torch.arange(row.start, row.end) for row in rows]).to(device)
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        ends = torch.tensor([row.end for row in rows], dtype=torch.int32)
        tables, slots = [], []
        for group, size in enumerate(self.block_sizes):
            width = max(-(-row.end // size) for row in rows)
            table = torch.zeros(len(rows), width, dtype=torch.int32)
            known: dict[int, torch.Tensor] = {}  # rows of one sequence share its blocks
            for index, row in enumerate(rows):
                blocks, count = row.blocks[group], -(-row.end // size)
                if id(blocks) not in known:
                    known[id(blocks)] = torch.tensor(blocks, dtype=torch.int32)
                table[index, :count] = known[id(blocks)][:count]
            table = table.to(device)
            owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)).to(device)
            slots.append(table[owner, positions // size].long() * size + positions % size)
            tables.append(table)
        metadata = build_attn_metadata(
            attn_groups=self._groups,
            num_reqs=len(rows),
            num_tokens=len(positions),
            query_start_loc_gpu=offsets.to(device),
            query_start_loc_cpu=offsets,
            max_query_len=max(lengths),
            seq_lens=ends.to(device),
            max_seq_len=int(ends.max()),
            block_tables=tables,
            slot_mappings=torch.stack(slots),
            kv_cache_config=self._kv_cache_config,
            seq_lens_cpu_upper_bound=ends,
            positions=positions,
            is_prefilling=torch.ones(len(rows), dtype=torch.bool),
        )
        tokens = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int32, device=device)
        with (
            torch.inference_mode(),
            no_adapters(self._runner, len(rows), len(positions)),
            set_forward_context(
                metadata,
                self._config,
                num_tokens=len(positions),
                slot_mapping=build_slot_mappings_by_layer(torch.stack(slots), self._kv_cache_config),
                # Hooks are seen by eager code alone; on a CPU, vLLM's compiled code is traced for its own steps only.
                skip_compiled=hooked or device.type == "cpu",
            ),
        ):
            return self._runner.model(
                input_ids=tokens, positions=positions + shift, intermediate_tensors=None, inputs_embeds=None
            )

    @contextmanager
    def _recording(self) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Note each layer's K and V before the backend packs or quantises them."""
        recorded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

        def note(layer: Any, inputs: tuple[Any, ...]) -> None:
            _, k, v = inputs[:3]
            recorded[layer.layer_name] = (
                k.reshape(-1, layer.num_kv_heads, layer.head_size).clone(),
                v.reshape(-1, layer.num_kv_heads, layer.head_size_v).clone(),
            )

        handles = [layer.register_forward_pre_hook(note) for layer in self.layers]
        try:
            yield recorded
        finally:
            for handle in handles:
                handle.remove()


def _layer_index(name: str) -> tuple[int, str]:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return (numbers[0] if numbers else 0, name)
