"""Surroundings of a forward inside vLLM's worker: context, connector hooks, parallel groups, stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.sequence import IntermediateTensors

__all__ = [
    "IntermediateTensors",
    "get_pp_group",
    "get_tp_group",
    "make_stage_inputs",
    "quiet_hooks",
    "replace_sequences",
    "set_forward_context",
]


def make_stage_inputs(runner: Any) -> None:
    """Make the buffers in which a later pipeline stage receives hidden states. vLLM makes them in a warm-up, which it
    leaves out on CPUs without compiled code."""
    if get_pp_group().is_first_rank or getattr(runner, "intermediate_tensors", 0) is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def replace_sequences(metadata: dict[str, Any] | None, slots: dict[str, Any]) -> None:
    """Have the rest of the forward in progress use other attention metadata and slots, both by layer."""
    context: Any = get_forward_context()
    context.attn_metadata, context.slot_mapping = metadata, slots


@contextmanager
def quiet_hooks(connector: Any) -> Iterator[None]:
    """Disable vLLM's per-layer connector hooks during our own forwards: without metadata they do nothing."""
    before = connector._connector_metadata
    connector._connector_metadata = None
    try:
        yield
    finally:
        connector._connector_metadata = before
