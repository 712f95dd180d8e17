"""Choosing the next token exactly as the model's own ``generate`` would."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

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
        for name, whole in (
            ("max_tokens", True),
            ("top_k", True),
            ("seed", True),
            ("temperature", False),
            ("top_p", False),
            ("repetition_penalty", False),
        ):
            value = getattr(self, name)
            kind = int if whole else (int, float)
            if value is not None and (not isinstance(value, kind) or not math.isfinite(value)):
                raise PromptError(f"{name}={value!r}: must be a {'whole ' if whole else 'finite '}number")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise PromptError(f"seed={self.seed}: must be at least 0 and below 2**63")
        if self.max_tokens < 1:
            raise PromptError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.temperature is not None and self.temperature != 0 and self.temperature < 1e-3:
            raise PromptError(f"temperature={self.temperature}: must be 0 (greedy) or at least 0.001")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise PromptError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 0:
            raise PromptError(f"top_k={self.top_k}: must not be negative; 0 keeps every token")
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise PromptError(f"repetition_penalty={self.repetition_penalty}: must be positive")

    def generate_options(self) -> dict[str, Any]:
        """The settings that differ from the model's own, as options of ``generate``."""
        options = {
            name: value
            for name in ("temperature", "top_p", "top_k", "repetition_penalty")
            if (value := getattr(self, name)) is not None
        }
        if self.temperature is not None:
            options["do_sample"] = self.temperature > 0
            if self.temperature == 0:
                del options["temperature"]
        return {**options, "max_new_tokens": self.max_tokens, "num_beams": 1}


class Sampler:
    """Picks tokens for one request, with the processors transformers itself would set up."""

    def __init__(self, model: PreTrainedModel, params: SamplingParams, prompt_length: int) -> None:
        config, _ = model._prepare_generation_config(None, **params.generate_options())
        model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device=model.device)
        self._greedy = not config.do_sample
        self._processors: LogitsProcessorList = model._get_logits_processor(
            config,
            input_ids_seq_length=prompt_length,
            logits_processor=LogitsProcessorList(),
            device=model.device,
            model_kwargs={},
        )
        self._generator = torch.Generator(model.device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def pick(self, logits: torch.Tensor, so_far: list[int]) -> int:
        """The next token after ``so_far`` (prompt and output) given its logits ``[vocab]``."""
        ids = torch.tensor([so_far], device=logits.device)
        scores = self._processors(ids, logits.float()[None])
        if self._greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


def stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end an answer."""
    eos = model.generation_config.eos_token_id
    return frozenset() if eos is None else frozenset(torch.as_tensor(eos).reshape(-1).tolist())
