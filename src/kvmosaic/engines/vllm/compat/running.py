"""Surroundings of a forward inside vLLM's worker: context, adapters, connector hooks, tensor-parallel group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.lora.layers import LoRAMapping

__all__ = ["get_tp_group", "no_adapters", "quiet_hooks", "set_forward_context"]


@contextmanager
def no_adapters(runner: Any, sequences: int, tokens: int) -> Iterator[None]:
    """Run ``tokens`` in ``sequences`` through the base model, then restore the adapters of the step."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        yield
        return
    adapters = manager._adapter_manager
    before = adapters._last_mapping
    adapters.set_adapter_mapping(LoRAMapping((0,) * tokens, (0,) * sequences, is_prefill=True))
    try:
        yield
    finally:
        if before is not None:
            adapters.set_adapter_mapping(before)


@contextmanager
def quiet_hooks(connector: Any) -> Iterator[None]:
    """Disable vLLM's per-layer connector hooks during our own forwards: without metadata they do nothing."""
    before = connector._connector_metadata
    connector._connector_metadata = None
    try:
        yield
    finally:
        connector._connector_metadata = before
