"""Pipeline parallelism: the way of hidden states from one stage to the next in our own forwards."""

from typing import Any

import torch

from kvmosaic.engines.vllm.compat.running import IntermediateTensors, get_pp_group


class StageFailedError(Exception):
    """An earlier stage failed, so there is nothing to compute with."""


class Stages:
    """The pipeline stages, seen from one of them; a single one sends and receives nothing.

    Hidden states take the same channel as those of vLLM's own forwards, and keep their order: all stages do the same
    forwards in the same order, ours of a step before vLLM's."""

    def __init__(self) -> None:
        self._group = get_pp_group()

    def receive(self) -> Any:
        """The previous stage's output, or ``None`` in the first stage. Raises :class:`StageFailedError`."""
        if self._group.is_first_rank:
            return None
        received = self._group.recv_tensor_dict()
        if not received:
            raise StageFailedError("an earlier pipeline stage failed")
        return IntermediateTensors(received)

    def hand_on(self, output: Any) -> torch.Tensor:
        """Send this stage's output to the next one. Returns hidden states ``[tokens, hidden]``, which are the model's
        output in the last stage."""
        if self._group.is_last_rank:
            # Models with some drafters return hidden states of other layers as well.
            hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
            return hidden
        self._group.send_tensor_dict(output.tensors)
        hidden = output.tensors["hidden_states"]
        return hidden

    def fail(self) -> None:
        """Tell the next stage, which is waiting, that it gets no hidden states."""
        if not self._group.is_last_rank:
            self._group.send_tensor_dict({})
