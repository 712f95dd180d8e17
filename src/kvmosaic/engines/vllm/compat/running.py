"""Surroundings of a forward inside vLLM's worker: context, adapters, connector hooks, tensor-parallel group."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.lora.layers import LoRAMapping

__all__ = ["adapters_of", "get_tp_group", "max_adapters", "quiet_hooks", "set_forward_context"]


def max_adapters(vllm_config: Any) -> int:
    """Maximum number of adapters that a forward can use."""
    return 0 if vllm_config.lora_config is None else int(vllm_config.lora_config.max_loras)


@contextmanager
def adapters_of(runner: Any, runs: Sequence[tuple[Any, int]]) -> Iterator[None]:
    """Run sequences with their own adapters, given as ``LoRARequest`` (``None``: the base model) and number of tokens
    of each. Then restore the adapters of the step."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        yield
        return
    inner = manager._adapter_manager
    before, active = inner._last_mapping, [each for each in inner.lora_index_to_id if each is not None]
    wanted = {adapter.lora_int_id: adapter for adapter, _ in runs if adapter is not None}
    for adapter in wanted.values():
        manager.add_adapter(msgspec.structs.replace(adapter, load_inplace=False))  # vLLM itself has replaced it
    ids = [0 if adapter is None else adapter.lora_int_id for adapter, _ in runs]
    tokens = tuple(each for each, (_, count) in zip(ids, runs, strict=True) for _ in range(count))
    inner.set_adapter_mapping(LoRAMapping(tokens, tuple(ids), is_prefill=True))
    try:
        yield
    finally:
        for each in active:  # ours may have taken the place of one of the step's
            if each in inner.list_adapters():
                inner.activate_adapter(each)
        if before is not None:
            inner.set_adapter_mapping(before)


@contextmanager
def quiet_hooks(connector: Any) -> Iterator[None]:
    """Disable vLLM's per-layer connector hooks during our own forwards: without metadata they do nothing."""
    before = connector._connector_metadata
    connector._connector_metadata = None
    try:
        yield
    finally:
        connector._connector_metadata = before
