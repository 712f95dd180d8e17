"""vLLM's CUDA graphs of parts of the model, between attention layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

LARGER_SIZES = range(640, 2561, 128)
"""Sizes, in tokens, of graphs that vLLM does not have by default. A load of 16,384 tokens recomputes 2,458 at 15 %.
Larger passes keep a GPU busy without graphs."""
NEEDED_BYTES = 2**14
"""Free memory without which no larger graphs are made, per layer and column of the hidden state: 2 GiB for 32 layers
of 4,096. An estimate on the safe side, because vLLM's own graphs come out of the same memory."""


def graph_size(runner: Any, tokens: int) -> int | None:
    """Size, in tokens, of the smallest piecewise CUDA graph (split at attention) that holds ``tokens``. ``None`` if
    vLLM has no such graph (yet), or none that we can feed."""
    manager = getattr(runner, "cudagraph_manager", None)
    if not getattr(manager, "_graphs_captured", False) or not _can_feed(runner):
        return None
    return min((graph.num_tokens for graph in _piecewise(manager) if graph.num_tokens >= tokens), default=None)


def has_room_for_graphs(runner: Any) -> bool:
    """Whether there is memory for graphs of :data:`LARGER_SIZES`."""
    if runner.device.type != "cuda":
        return False
    model = runner.model_config
    needed = NEEDED_BYTES * model.get_total_num_hidden_layers() * model.get_hidden_size()
    return bool(torch.cuda.mem_get_info(runner.device)[0] >= needed)


def add_larger_graphs(runner: Any) -> None:
    """Have vLLM capture graphs of :data:`LARGER_SIZES` as well, which its own steps do not use. To be called on all
    ranks or on none, when the cache is allocated and before vLLM captures. On many hosts, launching the kernels of a
    pass takes longer than running them, even for two thousand tokens."""
    graphs = _piecewise(runner.cudagraph_manager) if _can_feed(runner) else []
    largest = max(graphs, key=lambda graph: graph.num_tokens, default=None)
    # Small passes would be padded to the first of these sizes if vLLM's graphs ended far below it.
    if largest is None or largest.num_tokens < LARGER_SIZES.start - LARGER_SIZES.step:
        return
    most = min(runner.max_num_tokens, runner.model_config.max_model_len)
    sizes = [size for size in LARGER_SIZES if largest.num_tokens < size <= most]
    # vLLM captures large graphs first, so that small ones find memory in their pool.
    larger = [replace(largest, num_tokens=size) for size in reversed(sizes)]
    runner.cudagraph_manager._capture_descs[CUDAGraphMode.PIECEWISE] = [*larger, *graphs]


def larger_graphs(runner: Any) -> list[int]:
    """Sizes of the captured graphs of :data:`LARGER_SIZES` that a sequence may have, ascending."""
    manager = getattr(runner, "cudagraph_manager", None)
    if not getattr(manager, "_graphs_captured", False) or not _can_feed(runner):
        return []
    most = runner.model_config.max_model_len
    sizes = (graph.num_tokens for graph in _piecewise(manager))
    return sorted(size for size in sizes if size in LARGER_SIZES and size <= most)


def drop_larger_graphs(runner: Any) -> None:
    """Leave the graphs of :data:`LARGER_SIZES` unused."""
    manager = runner.cudagraph_manager
    kept = [graph for graph in _piecewise(manager) if graph.num_tokens not in LARGER_SIZES]
    manager._capture_descs[CUDAGraphMode.PIECEWISE] = kept


def _can_feed(runner: Any) -> bool:
    """Whether we can feed vLLM's piecewise graphs: those of the V2 runner, without adapters, of models with one
    position per token. Writing K and V must not be part of the graph, because it would write to the slots of the step
    in progress."""
    manager = getattr(runner, "cudagraph_manager", None)
    if (
        manager is None
        or getattr(manager, "use_breakable_cg", False)
        or runner.lora_config is not None
        or getattr(runner.model_state, "rope_state", None) is not None
    ):
        return False
    kind = "mla_" if runner.model_config.use_mla else ""
    return f"vllm::unified_{kind}kv_cache_update" in (manager.compilation_config.splitting_ops or ())


def _piecewise(manager: Any) -> list[Any]:
    return list(manager._capture_descs.get(CUDAGraphMode.PIECEWISE, ()))


@contextmanager
def graph_inputs(
    runner: Any, tokens: torch.Tensor, positions: torch.Tensor, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The input buffers of CUDA graphs, filled with ``tokens`` and ``positions``; all but the first ``count`` are
    padding. The inputs of the step in progress are restored afterwards."""
    buffers = runner.input_buffers
    places = [part[: len(tokens)] for part in (buffers.input_ids, buffers.positions, buffers.is_padding)]
    before = [place.clone() for place in places]
    padding = torch.arange(len(tokens), device=tokens.device) >= count
    for place, values in zip(places, (tokens, positions, padding), strict=True):
        place.copy_(values)
    try:
        yield places[0], places[1]
    finally:
        for place, values in zip(places, before, strict=True):
            place.copy_(values)


def graph_context(size: int | None) -> dict[str, Any]:
    """Arguments of ``set_forward_context`` that select the graph of ``size`` tokens."""
    if size is None:
        return {}
    return {"cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE, "batch_descriptor": BatchDescriptor(size)}


def asks_for_layers(forward_context: Any) -> bool:
    """Whether a forward that is still to come calls the connector's ``wait_for_layer_load`` for every layer. A CUDA
    graph of a whole step does not, and neither does a step that computes nothing."""
    mode = forward_context.cudagraph_runtime_mode
    return forward_context.attn_metadata is not None and mode != CUDAGraphMode.FULL
