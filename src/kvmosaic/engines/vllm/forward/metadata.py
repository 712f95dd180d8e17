"""Makes what attention backends need for a pass: metadata of virtual sequences, and the context of a forward."""

import copy
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvmosaic.engines.vllm.compat.graphs import graph_context
from kvmosaic.engines.vllm.compat.metadata import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    init_attn_backend,
    with_sequences,
)
from kvmosaic.engines.vllm.compat.running import replace_sequences, set_forward_context
from kvmosaic.engines.vllm.forward.runs import Pass, padded

PASS_RUNS = 256
"""Number of virtual sequences that a pass may have, if backends allow it. vLLM itself may be configured for fewer or
more."""


class MetadataBuilder(ABC):
    """Our own metadata builders: the runner's builders share buffers with the step in progress, and may accept only
    few sequences."""

    max_runs: int
    """Maximum number of runs that the builders accept."""

    @abstractmethod
    def build(self, work: Pass) -> dict[str, Any]:
        """Metadata by layer: every run is a sequence of its own, over the blocks of the sequence it belongs to."""

    @abstractmethod
    def context(
        self, work: Pass, metadata: dict[str, Any] | None, *, padding: int, graph: int | None, skip_compiled: bool
    ) -> AbstractContextManager[None]:
        """The surroundings of the model's forward over a pass and ``padding`` more tokens. ``metadata`` is ``None``
        if no backend computes attention; ``graph``: size of the CUDA graph to use, in tokens; ``skip_compiled``:
        whether to use no compiled code."""

    @property
    def can_replace(self) -> bool:
        """Whether :meth:`replace` works."""
        return False

    def replace(self, work: Pass, metadata: dict[str, Any] | None) -> None:
        """Have the rest of the forward in progress compute the tokens of another pass, with its ``metadata``."""
        raise NotImplementedError("this builder cannot change a forward in progress")


class VllmMetadataBuilder(MetadataBuilder):
    """With vLLM's own backends."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, runner: Any) -> None:
        """``runner`` is vLLM's model runner."""
        self._config = vllm_config
        self._kv_cache_config = copy.deepcopy(kv_cache_config)  # vLLM's function changes it
        roomy = with_sequences(vllm_config, kv_cache_config, PASS_RUNS)
        self._groups, _, _ = init_attn_backend(self._kv_cache_config, roomy, runner.device)
        self.max_runs: int = roomy.scheduler_config.max_num_seqs

    def build(self, work: Pass) -> dict[str, Any]:
        device = work.device
        offsets, ends = extents(work)
        metadata: dict[str, Any] = build_attn_metadata(
            attn_groups=self._groups,
            num_reqs=len(work.runs),
            num_tokens=work.num_tokens,
            query_start_loc_gpu=offsets.to(device),
            query_start_loc_cpu=offsets,
            max_query_len=int(offsets.diff().max()),
            seq_lens=ends.to(device),
            max_seq_len=int(ends.max()),
            block_tables=[block_table(work, group) for group in range(len(work.block_sizes))],
            slot_mappings=work.slots,
            kv_cache_config=self._kv_cache_config,
            seq_lens_cpu_upper_bound=ends,
            positions=work.positions,
            is_prefilling=torch.ones(len(work.runs), dtype=torch.bool),
        )
        return metadata

    def context(
        self, work: Pass, metadata: dict[str, Any] | None, *, padding: int, graph: int | None, skip_compiled: bool
    ) -> AbstractContextManager[None]:
        # A slot of -1 is not written.
        slots = build_slot_mappings_by_layer(padded(work.slots, padding, -1), self._kv_cache_config)
        context: AbstractContextManager[None] = set_forward_context(
            metadata,
            self._config,
            num_tokens=work.num_tokens + padding,
            slot_mapping=slots,
            skip_compiled=skip_compiled,
            **graph_context(graph),
        )
        return context

    @property
    def can_replace(self) -> bool:
        return True

    def replace(self, work: Pass, metadata: dict[str, Any] | None) -> None:
        replace_sequences(metadata, build_slot_mappings_by_layer(work.slots, self._kv_cache_config))


def extents(work: Pass) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each run begins among the tokens of the pass, ``[runs + 1]``, and where it ends in its sequence,
    ``[runs]``; int32, on the host."""
    lengths = [len(run.tokens) for run in work.runs]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return offsets, torch.tensor([run.end for run in work.runs], dtype=torch.int32)


def block_table(work: Pass, group: int) -> torch.Tensor:
    """The blocks of each run's sequence, ``[runs, blocks]`` int32."""
    runs, size = work.runs, work.block_sizes[group]
    table = np.zeros((len(runs), max(-(-run.end // size) for run in runs)), dtype=np.int32)
    known: dict[int, np.ndarray] = {}  # runs of one sequence share its blocks
    for index, run in enumerate(runs):
        blocks, count = run.blocks[group], -(-run.end // size)
        if id(blocks) not in known:
            known[id(blocks)] = np.asarray(blocks, dtype=np.int32)
        table[index, :count] = known[id(blocks)][:count]
    return torch.from_numpy(table).to(work.device)
