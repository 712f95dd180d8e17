"""Choosing the next token, with the model's own generation settings as defaults."""

from dataclasses import dataclass

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvmosaic.core.errors import PromptError


@dataclass(frozen=True)
class SamplingParams:
    """How to decode. ``None`` takes the model's own generation setting; ``temperature=0`` is greedy."""

    max_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise PromptError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.temperature is not None and self.temperature < 0:
            raise PromptError(f"temperature={self.temperature}: must not be negative; 0 is greedy")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise PromptError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 0:
            raise PromptError(f"top_k={self.top_k}: must not be negative; 0 keeps every token")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise PromptError(f"repetition_penalty={self.repetition_penalty}: must be positive")


class Sampler:
    """Picks tokens for one request."""

    def __init__(self, params: SamplingParams, defaults: GenerationConfig, device: torch.device) -> None:
        def choose(name: str) -> float | None:
            value = getattr(params, name)
            return getattr(defaults, name, None) if value is None else value

        temperature = choose("temperature") if params.temperature is not None or defaults.do_sample else 0.0
        self._greedy = temperature == 0.0
        self._processors = LogitsProcessorList()
        penalty, top_k, top_p = choose("repetition_penalty"), choose("top_k"), choose("top_p")
        if penalty not in (None, 1.0):
            self._processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        if not self._greedy:
            if temperature not in (None, 1.0):
                self._processors.append(TemperatureLogitsWarper(float(temperature)))
            if top_k:
                self._processors.append(TopKLogitsWarper(int(top_k)))
            if top_p is not None and top_p < 1.0:
                self._processors.append(TopPLogitsWarper(top_p))
        self._generator = torch.Generator(device)
        if params.seed is not None:
            self._generator.manual_seed(params.seed)
        else:
            self._generator.seed()

    def pick(self, logits: torch.Tensor, so_far: list[int]) -> int:
        """The next token after ``so_far`` (prompt and output) given its logits ``[vocab]``."""
        ids = torch.tensor([so_far], device=logits.device)
        scores = self._processors(ids, logits.float()[None]) if self._processors else logits[None]
        if self._greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


def stop_ids(defaults: GenerationConfig) -> frozenset[int]:
    """Tokens that end an answer."""
    eos = defaults.eos_token_id
    return frozenset(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
