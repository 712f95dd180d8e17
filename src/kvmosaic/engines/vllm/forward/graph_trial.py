"""Larger CUDA graphs than vLLM's own, for passes of loads. They are compared with passes without graphs, before any
request depends on them."""

import logging
from typing import Any

import torch

from kvmosaic.engines.vllm.compat.graphs import (
    add_larger_graphs,
    drop_larger_graphs,
    has_room_for_graphs,
    larger_graphs,
)
from kvmosaic.engines.vllm.forward.ranks import Ranks
from kvmosaic.engines.vllm.forward.runs import Run
from kvmosaic.engines.vllm.forward.sparse import SparseForward

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""

PADDED = 3
"""Number of padding tokens of each compared pass."""
MOST_DIFFERENT = 0.1
"""Maximum relative difference of the outputs of nine tokens in ten. Rounding gives about 0.01 in half precision; a
tenth of the tokens may be routed to other experts by chance. Wrong inputs give about 1.4."""


def plan_larger_graphs(runner: Any, ranks: Ranks) -> None:
    """Have vLLM capture larger graphs as well, if all ranks have memory for them: they capture together."""
    if ranks.stages == 1 and all(ranks.gather(has_room_for_graphs(runner))):
        add_larger_graphs(runner)


def try_larger_graphs(forward: SparseForward, runner: Any, ranks: Ranks) -> None:
    """Try the smallest and the largest of the graphs that were captured for us. If one gives other results than the
    model, none of them is used. To be called before any block is in use."""
    sizes = larger_graphs(runner)  # the same on all ranks
    if not sizes:
        return
    mine = ranks.together(
        lambda: max(_difference(forward, runner, tokens - PADDED) for tokens in (sizes[0], sizes[-1])),
        "trying CUDA graphs of larger passes",
    )
    difference = max(ranks.gather(float("inf") if mine is None else mine))
    if difference <= MOST_DIFFERENT:
        return
    drop_larger_graphs(runner)
    if ranks.rank == 0:
        logger.warning(
            "passes of %d tokens and more do without CUDA graphs, because results differ by %.3f from those of the "
            "model; answers are right, but reuse is slower; please report this",
            sizes[0],
            difference,
        )


def _difference(forward: SparseForward, runner: Any, tokens: int) -> float:
    """Relative difference of the outputs with and without a graph, of all but the worst tenth of the tokens."""
    # Block 0 is never used.
    blocks = [range(1, -(-tokens // size) + 1) for size in forward.kv.block_sizes]
    if any(row[-1] >= forward.kv.num_blocks for row in blocks):
        raise ValueError(f"the KV cache has no room for {tokens} tokens")
    vocabulary = runner.model_config.get_vocab_size()
    run = Run(tuple(index * 7919 % vocabulary for index in range(tokens)), 0, blocks)
    with_graph, plain = (forward.output(run, graphs=graphs).float() for graphs in (True, False))
    errors = (with_graph - plain).norm(dim=-1) / plain.norm(dim=-1)
    return float(torch.quantile(errors, 0.9).nan_to_num(float("inf")))
