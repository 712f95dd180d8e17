"""Attention metadata of virtual sequences."""

import copy
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvmosaic.engines.vllm.compat.metadata import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    init_attn_backend,
    with_sequences,
)
from kvmosaic.engines.vllm.forward.runs import Pass

PASS_RUNS = 256
"""Number of virtual sequences that a pass may have, if backends allow it. vLLM itself may be configured for fewer or
more."""


class MetadataBuilder:
    """Our own metadata builders: the runner's builders share buffers with the step in progress, and may accept only
    few sequences."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, device: torch.device) -> None:
        self._kv_cache_config = copy.deepcopy(kv_cache_config)  # vLLM's function changes it
        roomy = with_sequences(vllm_config, kv_cache_config, PASS_RUNS)
        self._groups, _, _ = init_attn_backend(self._kv_cache_config, roomy, device)
        self.max_runs: int = roomy.scheduler_config.max_num_seqs
        """Maximum number of runs that the builders accept."""

    def build(self, work: Pass) -> dict[str, Any]:
        """Metadata by layer: every run is a sequence of its own, over the blocks of the sequence it belongs to."""
        runs, device = work.runs, work.device
        lengths = [len(run.tokens) for run in runs]
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        ends = torch.tensor([run.end for run in runs], dtype=torch.int32)
        metadata: dict[str, Any] = build_attn_metadata(
            attn_groups=self._groups,
            num_reqs=len(runs),
            num_tokens=work.num_tokens,
            query_start_loc_gpu=offsets.to(device),
            query_start_loc_cpu=offsets,
            max_query_len=max(lengths),
            seq_lens=ends.to(device),
            max_seq_len=int(ends.max()),
            block_tables=[_block_table(work, group) for group in range(len(work.block_sizes))],
            slot_mappings=work.slots,
            kv_cache_config=self._kv_cache_config,
            seq_lens_cpu_upper_bound=ends,
            positions=work.positions,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
        )
        return metadata

    def slot_mappings(self, slots: torch.Tensor) -> Any:
        """Slots ``[groups, tokens]`` by layer; a slot of -1 is not written."""
        return build_slot_mappings_by_layer(slots, self._kv_cache_config)


def _block_table(work: Pass, group: int) -> torch.Tensor:
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
