"""Surroundings of a forward inside vLLM's worker: context, connector hooks, tensor-parallel group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context

__all__ = ["get_tp_group", "quiet_hooks", "set_forward_context"]


@contextmanager
def quiet_hooks(connector: Any) -> Iterator[None]:
    """Disable vLLM's per-layer connector hooks during our own forwards: without metadata they do nothing."""
    before = connector._connector_metadata
    connector._connector_metadata = None
    try:
        yield
    finally:
        connector._connector_metadata = before
