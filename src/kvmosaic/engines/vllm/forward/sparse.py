"""The sparse forward: compute any subset of paged sequences' tokens with vLLM's own model and backend.

Every run of consecutive tokens becomes a *virtual sequence*: its own row of query offsets and lengths over
the block table of the sequence it belongs to. vLLM writes the K and V of all rows before attention reads, so
each token sees exactly the positions at or before its own: fresh where selected, cached elsewhere. Where runs are
many and short, and the cache can be read as it is, attention is done by our own kernel instead (``tiles.py``).
"""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context

from kvmosaic.engines.vllm.compat import (
    attention_by,
    build_attn_metadata,
    build_slot_mappings_by_layer,
    graph_context,
    graph_inputs,
    graph_size,
    init_attn_backend,
    is_plain_attention,
    no_adapters,
    with_sequences,
    write_rows,
)
from kvmosaic.engines.vllm.forward.layer_arrivals import Arrivals
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import PagedTokens, Row, by_sequence
from kvmosaic.engines.vllm.forward.tile_attention import TileAttention

Observer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]

PASS_ROWS = 256
"""Virtual sequences in a pass, where backends let us; vLLM itself may be made for fewer, or for more."""


class _Enough(Exception):
    """A probe has seen what it wanted to see."""


class SparseForward:
    """Runs rows through the model, in as many passes as it takes."""

    def __init__(self, vllm_config: Any, runner: Any, kv_cache_config: Any) -> None:
        self._config = vllm_config
        self._runner = runner
        # Own metadata builders: the runner's share buffers with the step in progress, and may take few sequences.
        self._kv_cache_config = copy.deepcopy(kv_cache_config)
        roomy = with_sequences(vllm_config, kv_cache_config, PASS_ROWS)
        self._groups, _, _ = init_attn_backend(self._kv_cache_config, roomy, runner.device)
        self._most_rows = roomy.scheduler_config.max_num_seqs
        """The builders take no more."""
        self.block_sizes = [group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups]
        context = vllm_config.compilation_config.static_forward_context
        names = [name for group in self._kv_cache_config.kv_cache_groups for name in group.layer_names]
        self.layers: list[Any] = [context[name] for name in sorted(names, key=_layer_index)]
        """The attention layers, first to last."""
        self.index_of = {layer.layer_name: index for index, layer in enumerate(self.layers)}
        self._group_of = {
            name: index
            for index, group in enumerate(self._kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        # On a CPU, vLLM's compiled code is traced for its own steps only; that of some models takes embeddings.
        takes_embeddings = (
            getattr(runner, "supports_mm_inputs", False) or vllm_config.model_config.enable_prompt_embeds
        )
        self._runs_compiled = runner.device.type != "cpu" and not takes_embeddings
        self._tiles: TileAttention | None = None
        self.arrivals: Arrivals | None = None
        """What is on its way into the cache."""

    @property
    def max_tokens(self) -> int:
        """The longest sequence there may be."""
        return int(self._config.model_config.max_model_len)

    @property
    def step_tokens(self) -> int:
        """Tokens that vLLM computes in a step at most."""
        return int(self._config.scheduler_config.max_num_batched_tokens)

    @property
    def device(self) -> torch.device:
        return self._runner.device

    def run(self, rows: Sequence[Row]) -> None:
        """Compute all rows. Rows of one sequence come in ascending order, so that passes build on each other."""
        for batch in self._passes(rows):
            self._forward(batch, graphs=True)

    def outputs(self, rows: Sequence[Row], shift: int = 0) -> torch.Tensor:
        """Compute all rows, without CUDA graphs, whose results the next pass would overwrite, and return the last
        hidden states ``[tokens, hidden]``. With ``shift`` the model is told positions that much higher."""
        return torch.cat([self._forward(batch, shift) for batch in self._passes(rows)])

    def capture(self, rows: Sequence[Row], shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute all rows and return the K and V they cache: ``[layers, tokens, heads, dim]`` each, keys rotated.
        With ``shift`` the model is told positions that much higher, while rows see the same keys."""
        noted: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in self.layers]

        def note(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            for parts, part in zip(noted[index], (k, v), strict=True):
                parts.append(part.clone())

        for batch in self._passes(rows):
            self._forward(batch, shift, note, range(len(self.layers)))
        k, v = (torch.stack([torch.cat(layer[which]) for layer in noted]) for which in (0, 1))
        return k, v

    def probe(self, rows: Sequence[Row], layers: Sequence[int], observe: Observer) -> None:
        """Compute rows no further than the K and V of the last of ``layers``, which are written, too. ``observe`` is
        told, pass by pass, for each of these its index, queries ``[tokens, heads, dim]``, K and V ``[tokens,
        kv_heads, dim]``."""
        last = layers[-1]
        for batch in self._passes(rows):
            slots = [torch.from_numpy(each).to(self.device) for each in self._slots(by_sequence(batch))]

            def note(
                index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: list[torch.Tensor] = slots
            ) -> None:
                observe(index, q, k, v)
                if index == last:
                    self.write(self.layers[last], k, v, slots)
                    raise _Enough

            with suppress(_Enough):
                self._forward(batch, 0, note, layers, graphs=True)

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

    def use_tiles(self, ranks: Ranks) -> None:
        """From now on attention may read the cache by our own kernel, where that is faster."""
        if all(map(is_plain_attention, self.layers)) and len({layer.num_heads for layer in self.layers}) == 1:
            self._tiles = TileAttention(self, self._kv_cache_config.num_blocks, ranks)

    def metadata(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What the backends of all layers need to know of virtual sequences."""
        device = self.device
        lengths = [len(row.tokens) for row in rows]
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        ends = torch.tensor([row.end for row in rows], dtype=torch.int32)
        tables = []
        for group, size in enumerate(self.block_sizes):
            table = np.zeros((len(rows), max(-(-row.end // size) for row in rows)), dtype=np.int32)
            known: dict[int, np.ndarray] = {}  # rows of one sequence share its blocks
            for index, row in enumerate(rows):
                blocks, count = row.blocks[group], -(-row.end // size)
                if id(blocks) not in known:
                    known[id(blocks)] = np.asarray(blocks, dtype=np.int32)
                table[index, :count] = known[id(blocks)][:count]
            tables.append(torch.from_numpy(table).to(device))
        sequences = by_sequence(rows)
        metadata: dict[str, Any] = build_attn_metadata(
            attn_groups=self._groups,
            num_reqs=len(rows),
            num_tokens=sum(lengths),
            query_start_loc_gpu=offsets.to(device),
            query_start_loc_cpu=offsets,
            max_query_len=max(lengths),
            seq_lens=ends.to(device),
            max_seq_len=int(ends.max()),
            block_tables=tables,
            slot_mappings=torch.from_numpy(np.stack(self._slots(sequences))).to(device),
            kv_cache_config=self._kv_cache_config,
            seq_lens_cpu_upper_bound=ends,
            positions=torch.from_numpy(np.concatenate([each.positions for each in sequences])).to(device),
            is_prefilling=torch.ones(len(rows), dtype=torch.bool),
        )
        return metadata

    def _passes(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Cut rows into passes within the limits on tokens and, where a backend is to attend, on rows."""
        scheduler = self._config.scheduler_config
        room = scheduler.max_num_batched_tokens
        most_rows = room if self._in_tiles(rows) else self._most_rows
        batch: list[Row] = []
        for row in rows:
            rest = row
            while rest.tokens:
                if room == 0 or len(batch) == most_rows:
                    yield batch
                    room, batch = scheduler.max_num_batched_tokens, []
                piece = Row(rest.tokens[:room], rest.start, rest.blocks)
                batch.append(piece)
                room -= len(piece.tokens)
                rest = Row(rest.tokens[len(piece.tokens) :], piece.end, rest.blocks)
        if batch:
            yield batch

    def _in_tiles(self, rows: Sequence[Row]) -> bool:
        return self._tiles is not None and self._tiles.is_cheaper(rows)

    def _slots(self, sequences: Sequence[PagedTokens]) -> list[np.ndarray]:
        """Slot of each token of some sequences, per KV cache group, ``[tokens]`` int64."""
        return [
            np.concatenate(
                [
                    np.asarray(blocks[group], dtype=np.int64)[positions // size] * size + positions % size
                    for positions, blocks in sequences
                ]
            )
            for group, size in enumerate(self.block_sizes)
        ]

    def _forward(
        self,
        rows: Sequence[Row],
        shift: int = 0,
        observe: Observer | None = None,
        observed: Collection[int] = (),
        graphs: bool = False,
    ) -> torch.Tensor:
        """One pass; the last hidden states ``[tokens, hidden]``. ``observe`` is told of the layers ``observed``. With
        ``graphs`` through vLLM's CUDA graphs, if one is large enough: a few tokens take their time in launching
        kernels, not in running them."""
        device = self.device
        sequences = by_sequence(rows)
        count = sum(len(row.tokens) for row in rows)
        size = graph_size(self._runner, count) if graphs and self._runs_compiled else None
        padding = (0, (size or count) - count)
        tiles = self._tiles if self._in_tiles(rows) or len(rows) > self._most_rows else None
        queries = None if tiles is None else tiles.queries(sequences)
        positions = np.pad(np.concatenate([each.positions for each in sequences]) + shift, padding)
        slots = np.pad(np.stack(self._slots(sequences)), ((0, 0), padding), constant_values=-1)  # not written
        tokens = np.pad(np.array([token for row in rows for token in row.tokens], dtype=np.int32), padding)
        inputs = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)

        def attend(
            layer: Any, q: torch.Tensor, k: Any, v: Any, out: torch.Tensor, backend: Callable[[], object]
        ) -> None:
            index = self.index_of[layer.layer_name]
            before(layer)  # it may have K and V of another layer's
            if observe is not None and index in observed:
                observe(index, q[:count], k[:count], v[:count])
            if tiles is None or queries is None:
                backend()
            else:
                tiles.attend(layer, q[:count], queries, out[:count])

        def before(layer: Any) -> None:
            if self.arrivals is not None:
                self.arrivals.wait(self.index_of[layer.layer_name])

        everywhere = queries is not None or (self.arrivals is not None and self.arrivals.pending)
        # No layers that need not be: between CUDA graphs, every call in Python counts.
        watched = self.layers if everywhere else [self.layers[index] for index in observed]
        with (
            torch.inference_mode(),
            no_adapters(self._runner, len(sequences), count),
            attention_by(attend, before, watched),
            set_forward_context(
                self.metadata(rows) if queries is None else None,
                self._config,
                num_tokens=len(tokens),
                slot_mapping=build_slot_mappings_by_layer(torch.from_numpy(slots).to(device), self._kv_cache_config),
                skip_compiled=not self._runs_compiled,
                **graph_context(size),
            ),
            nullcontext(inputs) if size is None else graph_inputs(self._runner, *inputs, count) as (
                input_ids,
                places,
            ),
        ):
            hidden = self._runner.model(
                input_ids=input_ids, positions=places, intermediate_tensors=None, inputs_embeds=None
            )
            return hidden[:count]


def _layer_index(name: str) -> tuple[int, str]:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return (numbers[0] if numbers else 0, name)
