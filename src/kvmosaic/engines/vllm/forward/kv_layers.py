"""The attention layers of a model and their paged caches."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.core.window import WindowTails
from kvmosaic.engines.vllm.compat.drafts import draft_layers
from kvmosaic.engines.vllm.compat.layers import KVLayer, PairLayer, attention_layers, has_shared_caches
from kvmosaic.engines.vllm.compat.quantised import has_scales_per_head
from kvmosaic.engines.vllm.forward.runs import Pass, Run


class KVLayers:
    """All layers of the model that cache K and V, first to last, and access to their caches. Layers of a draft model
    are not among them, because only the model's own decide about answers."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, runner: Any) -> None:
        """``runner`` is vLLM's model runner."""
        groups = kv_cache_config.kv_cache_groups
        self.device: torch.device = runner.device
        drafts, every = draft_layers(runner), attention_layers(vllm_config, kv_cache_config)
        self.layers: list[KVLayer] = [layer for layer in every if layer.name not in drafts]
        self.of_draft_model: list[KVLayer] = [layer for layer in every if layer.name in drafts]
        """The layers of a draft model."""
        self.drafts: list[KVLayer] = []
        """Those layers of a draft model whose KV is in entries as well; all of them or none."""
        self.num_blocks: int = kv_cache_config.num_blocks
        self.block_sizes: list[int] = [group.kv_cache_spec.block_size for group in groups]
        """Tokens per block, per KV cache group."""
        self.has_shared_caches = has_shared_caches(vllm_config)
        """Whether the model has further attention layers, which read the caches of these."""
        if self.has_shared_caches and vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise UnsupportedModelError(
                "the chunk cache cannot be used here: layers that share a KV cache were never tried with "
                "pipeline_parallel_size > 1; set it to 1 and use tensor_parallel_size"
            )
        if len({layer.quantised and layer.quantised.name for layer in self.layers}) > 1:
            raise UnsupportedModelError(
                "the chunk cache cannot be used here: some layers have a quantised KV cache, others have none or "
                "another kind; set kv_cache_dtype to the model's own dtype"
            )
        if self.is_quantised and any(has_scales_per_head(layer.module) for layer in self.layers):
            raise UnsupportedModelError(
                "the chunk cache cannot be used here: a KV cache quantised with scales of each head was never tried; "
                "set kv_cache_dtype to the model's own dtype"
            )
        self._group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}

    @cached_property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """The caches of K and V of each layer, if they are separate; otherwise ``None``."""
        pairs = [layer.pair for layer in self.layers if isinstance(layer, PairLayer)]
        return pairs if len(pairs) == len(self) else None

    def keep_drafts(self, drafts: Sequence[KVLayer]) -> None:
        """Have entries also hold the KV of these layers of a draft model. To be called before any entry is made."""
        self.drafts = list(drafts)
        for name in ("index_of", "query_heads"):
            self.__dict__.pop(name, None)

    @property
    def kept(self) -> list[KVLayer]:
        """The layers whose KV is in entries: the model's, then those of a draft model."""
        return [*self.layers, *self.drafts] if self.drafts else self.layers

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Index of each layer among those that are kept, by vLLM's name of it."""
        return {layer.name: index for index, layer in enumerate(self.kept)}

    @cached_property
    def query_heads(self) -> frozenset[int]:
        """All numbers of query heads of a layer that is kept."""
        return frozenset(layer.heads for layer in self.kept)

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def full(self) -> tuple[int, ...]:
        """Layers whose attention reaches every earlier token."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.window is None)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """Layers with a sliding window."""
        return tuple(index for index in range(len(self.layers)) if index not in self.full)

    @property
    def is_quantised(self) -> bool:
        """Whether the caches hold rounded numbers. Attention then sees K and V less exactly than they were
        computed."""
        return self.layers[0].quantised is not None

    def format(self, dtype: torch.dtype, tails: WindowTails) -> KVFormat:
        """Format of this rank's entries."""
        layer = self.layers[0]
        return KVFormat(len(self.kept), layer.kv_heads, layer.k_dim, layer.v_dim, dtype, tails)

    @property
    def free_blocks(self) -> list[range]:
        """Some blocks, per KV cache group, that are free while the engine starts; block 0 is never used."""
        return [range(1, 9) for _ in self.block_sizes]

    def make_pass(self, runs: Sequence[Run]) -> Pass:
        return Pass(runs, self.block_sizes, self.device)

    def first_runs_first(self, runs: Sequence[Run]) -> Sequence[Run]:
        """The runs in the order that needs the fewest passes, if those that begin a sequence need their own."""
        if not self.layers[0].keeps_first_runs_apart:
            return runs
        return sorted(runs, key=lambda run: run.start > 0)

    def can_share_a_pass(self, one: Run, other: Run) -> bool:
        """Whether a pass may have both runs. A pass has one adapter, because vLLM has room for few changes of adapter
        in a pass, and on CPUs (0.32) computes tokens without an adapter wrongly beside others."""
        is_apart = self.layers[0].keeps_first_runs_apart and (one.start == 0) != (other.start == 0)
        return one.adapter_id == other.adapter_id and not is_apart

    def short_first(self, work: Pass) -> Pass:
        """The pass with its runs in the order in which backends are fastest."""
        if not self.layers[0].prefers_short_first:
            return work
        return self.make_pass(sorted(work.runs, key=lambda run: len(run.tokens)))

    def slots(self, positions: torch.Tensor, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Slot of each position ``[tokens]`` of a sequence, ``[groups, tokens]``."""
        tables = [torch.tensor(row, dtype=torch.long, device=self.device) for row in blocks]
        return torch.stack(
            [
                table[positions // size] * size + positions % size
                for table, size in zip(tables, self.block_sizes, strict=True)
            ]
        )

    def write(self, layer: KVLayer, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store K and V ``[tokens, heads, dim]`` of one layer at ``slots`` ``[groups, tokens]``; the backend chooses
        the memory order."""
        layer.write(k, v, slots[self._group_of[layer.name]])
