"""Ordinary generation by transformers itself, with a clock: for requests without chunks, and as the baseline."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvmosaic.engines.hf.attention import exclusive
from kvmosaic.engines.hf.rotary import find_tables
from kvmosaic.engines.hf.sampling import SamplingParams


class Decoded(NamedTuple):
    """Generated tokens, and milliseconds until the first."""

    tokens: list[int]
    ttft_ms: float


class _Clock(BaseStreamer):
    """Records when tokens come. Transformers streams the prompt first, then every new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def plain_generate(model: PreTrainedModel, tokens: Sequence[int], params: SamplingParams, start: float) -> Decoded:
    """Answer with a full prefill and the model's own ``generate``; ``start`` is when the request came in."""
    ids = torch.tensor([list(tokens)], device=model.device)
    clock = _Clock()
    with exclusive, torch.random.fork_rng(enabled=params.seed is not None):
        for table in find_tables(model, model.dtype):
            table.reset()
        if params.seed is not None:
            torch.manual_seed(params.seed)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=clock,
            **params.generate_options(),
        )
    return Decoded(output[0, len(tokens) :].tolist(), (clock.times[1] - start) * 1e3)
