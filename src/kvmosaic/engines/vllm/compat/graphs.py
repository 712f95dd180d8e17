"""vLLM's CUDA graphs of parts of the model, between attention layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor


def graph_size(runner: Any, tokens: int) -> int | None:
    """Tokens of the smallest CUDA graph, in pieces between attention, that takes ``tokens``; ``None`` where vLLM has
    none (yet), or none that we know how to feed: the V2 runner's, without adapters, of models that take one position
    for each token. Writing K and V must be no part of it, or it would write where the step in progress does."""
    manager = getattr(runner, "cudagraph_manager", None)
    if (
        not getattr(manager, "_graphs_captured", False)
        or getattr(manager, "use_breakable_cg", False)
        or runner.lora_config is not None
        or getattr(runner.model_state, "rope_state", None) is not None
    ):
        return None
    assert manager is not None
    if "vllm::unified_kv_cache_update" not in (manager.compilation_config.splitting_ops or ()):
        return None
    graphs = manager._capture_descs.get(CUDAGraphMode.PIECEWISE, ())
    return min((graph.num_tokens for graph in graphs if graph.num_tokens >= tokens), default=None)


@contextmanager
def graph_inputs(
    runner: Any, tokens: torch.Tensor, positions: torch.Tensor, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The memory that CUDA graphs read their inputs from, holding ``tokens`` and ``positions``, of which the first
    ``count`` are no padding. The step in progress has its own inputs back afterwards."""
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
    """What ``set_forward_context`` has to know for a graph of ``size`` tokens to be used."""
    if size is None:
        return {}
    return {"cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE, "batch_descriptor": BatchDescriptor(size)}


def asks_for_layers(forward_context: Any) -> bool:
    """Whether a forward, if it is still to come, calls the connector's ``wait_for_layer_load`` for every layer. A
    graph of a whole step does not, nor does a step that computes nothing."""
    mode = forward_context.cudagraph_runtime_mode
    return forward_context.attn_metadata is not None and mode != CUDAGraphMode.FULL
