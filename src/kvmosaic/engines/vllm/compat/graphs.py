"""vLLM's CUDA graphs of parts of the model, between attention layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor


def graph_size(runner: Any, tokens: int) -> int | None:
    """Size, in tokens, of the smallest piecewise CUDA graph (split at attention) that holds ``tokens``. ``None`` if
    vLLM has no such graph (yet), or none that we can feed. We can feed graphs of the V2 runner, without adapters, of
    models with one position per token. Writing K and V must not be part of the graph, because it would write to the
    slots of the step in progress."""
    manager = getattr(runner, "cudagraph_manager", None)
    if (
        not getattr(manager, "_graphs_captured", False)
        or getattr(manager, "use_breakable_cg", False)
        or runner.lora_config is not None
        or getattr(runner.model_state, "rope_state", None) is not None
    ):
        return None
    assert manager is not None
    kind = "mla_" if runner.model_config.use_mla else ""
    if f"vllm::unified_{kind}kv_cache_update" not in (manager.compilation_config.splitting_ops or ()):
        return None
    graphs = manager._capture_descs.get(CUDAGraphMode.PIECEWISE, ())
    return min((graph.num_tokens for graph in graphs if graph.num_tokens >= tokens), default=None)


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
