"""An assembled prompt, and the decoding of its answer."""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.chunk_cache import Missing
from kvmosaic.engines.hf.plain import Decoded
from kvmosaic.engines.hf.request_kv import RequestKV
from kvmosaic.engines.hf.sampling import Sampler, SamplingParams, stop_ids
from kvmosaic.engines.results import ChunkReport


class Assembled(NamedTuple):
    """A prompt ready to decode: logits ``[vocab]`` after it, the next step, and reports about its chunks."""

    logits: torch.Tensor
    kv: RequestKV
    step: Callable[[Sequence[int]], torch.Tensor]
    """Computes the last of these tokens, all others being cached: logits ``[vocab]`` after it."""
    reports: tuple[ChunkReport, ...] = ()
    recomputed: tuple[int, ...] = ()
    """Positions of chunk tokens that were recomputed."""
    probed: bool | None = None
    """Whether the policy probed the prompt to choose them; ``None`` if no policy was asked."""
    charged_ratio: float = 0.0
    """Cost of recomputing and choosing them, as a share of computing all chunk tokens in all layers."""
    missing: Mapping[tuple[int, ...], Missing] = MappingProxyType({})
    """Chunks that were in no tier and were computed as ordinary text."""


def decode(
    model: PreTrainedModel, prompt: ChunkedPrompt, assembled: Assembled, params: SamplingParams, start: float
) -> Decoded:
    """Sample until a stop token or the limit."""
    sampler = Sampler(model, params, len(prompt.token_ids))
    stops = stop_ids(model)
    so_far = list(prompt.token_ids)
    output: list[int] = []
    logits, ttft_ms = assembled.logits, 0.0
    while True:
        token = sampler.pick(logits, so_far)
        if not output:
            ttft_ms = (time.perf_counter() - start) * 1e3
        output.append(token)
        so_far.append(token)
        if token in stops or len(output) == params.max_tokens:
            return Decoded(output, ttft_ms)
        logits = assembled.step(so_far)
