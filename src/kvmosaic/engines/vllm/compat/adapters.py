"""vLLM's LoRA adapters: which are loaded, which of them a forward can use, and what they consist of."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.layers import LoRAMapping


def _manager(runner: Any) -> Any:
    """vLLM's ``LoRAModelManager``; ``None`` if LoRA is off."""
    outer = getattr(runner, "lora_manager", None)
    return None if outer is None else outer._adapter_manager


def loaded_adapters(runner: Any) -> dict[int, Any]:
    """The adapters that vLLM has in memory, by number, each a ``LoRAModel``. Asking does not count as a use of
    them."""
    manager = _manager(runner)
    return {} if manager is None else manager.list_adapters()


def active_adapters(runner: Any) -> set[int]:
    """Numbers of the adapters that a forward can use. vLLM activates those of a step before the connector's work."""
    manager = _manager(runner)
    return set() if manager is None else {each for each in manager.lora_index_to_id if each is not None}


def adapter_weights(runner: Any, adapter: Any) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Names and contents of everything that a ``LoRAModel`` changes in this model. Settings of vLLM may leave out
    modules of it. The weights are those of all tensor-parallel ranks: vLLM splits them when it activates an
    adapter."""
    modules = _manager(runner).modules
    for module in sorted(modules.keys() & adapter.loras.keys()):
        for field, value in sorted(vars(adapter.loras[module]).items()):
            # A packed module (q, k and v in one) has a list.
            for index, part in enumerate(value if isinstance(value, list) else [value]):
                yield f"{module}.{field}.{index}", part if isinstance(part, torch.Tensor) else repr(part)


@contextmanager
def with_adapter(runner: Any, adapter_id: int, sequences: int, tokens: int) -> Iterator[None]:
    """Run ``tokens`` in ``sequences`` with an adapter that is active, or with none (0). Then restore the adapters of
    the step's own tokens."""
    manager = _manager(runner)
    if manager is None:
        yield
        return
    before = manager._last_mapping
    manager.set_adapter_mapping(LoRAMapping((adapter_id,) * tokens, (adapter_id,) * sequences, is_prefill=True))
    try:
        yield
    finally:
        # The adapters of an earlier step may be gone, as those that vLLM makes up at its start. The next step sets
        # its own.
        if before is not None and set(before.prompt_mapping) - {0} <= active_adapters(runner):
            manager.set_adapter_mapping(before)
