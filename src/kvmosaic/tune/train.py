"""The training loop: Adam on the sink's numbers, held-out prompts, and a state that a later run continues from."""

import logging
import math
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kvmosaic.core.errors import KvmosaicError
from kvmosaic.engines.chunk_cache import KV
from kvmosaic.engines.hf.model import HFModel
from kvmosaic.tune.base import TrainingPrompt
from kvmosaic.tune.lessons import Lessons
from kvmosaic.tune.student import Distillation

logger = logging.getLogger(__name__)

WARM_UP_STEPS, WARM_UP_SHARE = 20, 0.05
"""Warm-up of the learning rate: number of steps, or share of the run, whichever ends first."""
RECOMPUTED_RATIOS = (0.0, 0.0, 0.05, 0.15)
"""Shares of chunk tokens that are recomputed in training, step by step in turn, because one sink serves all."""
ANSWERED_STEPS = 4
"""Number of steps whose prompts are answered together, because a GPU generates 64 answers as fast as 16."""
MAX_ANSWER = 16
"""Maximum number of tokens of the answers that student and teacher are compared on."""


class DivergedError(KvmosaicError):
    """Training made things worse."""


@dataclass(frozen=True)
class Recipe:
    """How a sink is learned."""

    steps: int = 2500
    """Maximum number of steps."""
    minutes: float = 15.0
    """Maximum training time in minutes. The learning rate falls to 0 by the end of the steps or of the time."""
    batch: int = 16
    """Number of prompts per step."""
    together: int = 16
    """Number of prompts computed at the same time. A GPU spends its time launching kernels, so more cost little."""
    learning_rate: float = 0.005
    """Learning rate of the sink's numbers, in units of their own spread, which differs greatly between layers."""
    max_prompt: int = 1536
    """Maximum number of tokens of a prompt."""
    judged: int = 24
    """Number of held-out prompts that the sink is judged by."""
    seed: int = 0

    @classmethod
    def for_cpu(cls, **settings: float) -> "Recipe":
        """A recipe with fewer and shorter prompts, so that there are enough steps in a quarter of an hour."""
        return cls(**{"batch": 2, "together": 1, "max_prompt": 512, "judged": 8, **settings})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    step: int
    share: float
    """Share of the run that is done, 0 to 1."""
    train_kl: float
    """Running mean of the training KL in nats, over steps that recompute nothing."""
    held_out_kl: float | None = None
    """Mean KL of held-out prompts in nats, when it was last measured."""


class SinkTrainer:
    """Learns the numbers of a sink. The model stays as it is."""

    def __init__(self, engine: HFModel, sink: KV, recipe: Recipe) -> None:
        """``sink``: the initial sink, K ``[heads, layers, tokens, k_dim]`` and V."""
        self._engine = engine
        self._distillation = Distillation(engine)
        self.recipe = recipe
        self._start = tuple(part.detach().float().clone() for part in sink)
        # The spread of all tokens but the first, which may be an outlier, thousands of times as large.
        self._units = tuple(part[:, :, 1:].std(dim=(2, 3), keepdim=True).clamp(min=1e-6) for part in self._start)
        self._offsets = [torch.zeros_like(part, requires_grad=True) for part in self._start]
        self._optimizer = torch.optim.Adam(self._offsets, lr=recipe.learning_rate, betas=(0.9, 0.98))
        self.step = 0
        """Number of finished steps."""
        self._seconds = 0.0
        self._train_kl = math.nan

    @property
    def sink(self) -> KV:
        """The current numbers, in fp32."""
        k, v = (
            start + unit * offset for start, unit, offset in zip(self._start, self._units, self._offsets, strict=True)
        )
        return k, v

    def run(self, lessons: Lessons) -> Iterator[Progress]:
        """Train, and yield the progress after every step, so that the caller can look at it or save the state."""
        begun = time.monotonic() - self._seconds
        with _frozen(self._engine.model), _fast_products(), ThreadPoolExecutor(1) as reader:
            # In the same groups as in a run without interruption: rounding depends on the group.
            first = self.step - self.step % ANSWERED_STEPS
            coming = reader.submit(self._prompts, lessons, first)
            answers: list[TrainingPrompt] = []
            while (share := self._share()) < 1:
                if not answers:
                    prompts, done = coming.result(), self.step - first
                    first += ANSWERED_STEPS
                    coming = reader.submit(self._prompts, lessons, first)
                    answers = answered(self._engine, prompts, ANSWERED_STEPS * self.recipe.together)
                    del answers[: done * self.recipe.batch]
                self._learn(answers[: self.recipe.batch], share)
                del answers[: self.recipe.batch]
                self.step += 1
                self._seconds = time.monotonic() - begun
                yield Progress(self.step, self._share(), self._train_kl)

    def save(self, path: Path) -> None:
        """Save the state of the run. Raises an ``OSError`` if that fails."""
        state = {
            "offsets": [offset.detach().cpu() for offset in self._offsets],
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self._seconds,
            "train_kl": self._train_kl,
        }
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            torch.save(state, scratch)
            scratch.replace(path)
        except RuntimeError as error:  # torch's own for a full disk
            raise OSError(f"cannot save the state of the run at {path}: {' '.join(str(error).split())}") from None
        finally:
            scratch.unlink(missing_ok=True)

    def restore(self, path: Path) -> None:
        """Continue from a state that :meth:`save` wrote, or from the beginning if the file is damaged."""
        try:
            state = torch.load(path, weights_only=True, map_location=self._engine.model.device)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            logger.warning("cannot read %s; training starts again: %s", path, " ".join(str(error).split())[:200])
            return
        with torch.no_grad():
            for offset, kept in zip(self._offsets, state["offsets"], strict=True):
                offset.copy_(kept)
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self._seconds, self._train_kl = state["step"], state["seconds"], state["train_kl"]

    def _share(self) -> float:
        return max(self.step / self.recipe.steps, self._seconds / 60 / self.recipe.minutes)

    def _prompts(self, lessons: Lessons, step: int) -> list[TrainingPrompt]:
        """The prompts of ``ANSWERED_STEPS`` steps."""
        first, count = step * self.recipe.batch, ANSWERED_STEPS * self.recipe.batch
        return [lessons[first + index] for index in range(count)]

    def _learn(self, prompts: Sequence[TrainingPrompt], share: float) -> None:
        for settings in self._optimizer.param_groups:
            warm_up = min(1.0, max((self.step + 1) / WARM_UP_STEPS, share / WARM_UP_SHARE))
            settings["lr"] = self.recipe.learning_rate * warm_up * (0.5 + 0.5 * math.cos(math.pi * min(1.0, share)))
        self._optimizer.zero_grad()
        ratio = RECOMPUTED_RATIOS[self.step % len(RECOMPUTED_RATIOS)]
        total = 0.0
        with self._engine.session(gradients=True):
            for group in _groups(prompts, self.recipe.together):
                positions = [chunk_starts(prompt, ratio) for prompt in group]
                divergence = self._distillation.divergence(group, self.sink, positions)
                losses = [_loss(kl, prompt.answer) for kl, prompt in zip(divergence, group, strict=True)]
                loss = torch.stack(losses).sum() / len(prompts)
                loss.backward()
                total += float(loss.detach())
        if not math.isfinite(total):
            raise DivergedError(
                f"training diverged at step {self.step}; nothing was written; look at the data, or try another --seed"
            )
        torch.nn.utils.clip_grad_norm_(self._offsets, 1.0)
        self._optimizer.step()
        if ratio == 0:
            self._train_kl = total if math.isnan(self._train_kl) else 0.95 * self._train_kl + 0.05 * total


def _loss(divergence: torch.Tensor, answer: int) -> torch.Tensor:
    """Loss of a prompt from the KL after each compared token, ``[compared]``, the last ``answer`` of which predict
    the answer. It counts as much as all tokens before it, of which there may be many more."""
    parts = divergence.split([len(divergence) - answer, answer])
    return torch.stack([part.mean() for part in parts if len(part)]).mean()


def answered(engine: HFModel, prompts: Sequence[TrainingPrompt], together: int) -> list[TrainingPrompt]:
    """The prompts with the model's own answers; ``together`` of them are computed at the same time."""
    distillation = Distillation(engine)
    with engine.session():
        said: dict[TrainingPrompt, TrainingPrompt] = {}
        for group in _groups(prompts, together):
            said.update(zip(group, distillation.answered(group, MAX_ANSWER), strict=True))
    return [said[prompt] for prompt in prompts]


def mean_kl(engine: HFModel, sink: KV, prompts: Sequence[TrainingPrompt], together: int) -> float:
    """Mean KL in nats over prompts with chunks that are filled after ``sink``, nothing recomputed; ``together`` of
    them are computed at the same time."""
    distillation = Distillation(engine)
    total = 0.0
    with engine.session(gradients=True), torch.no_grad():
        for group in _groups(prompts, together):
            total += sum(float(kl.mean()) for kl in distillation.divergence(group, sink, [()] * len(group)))
    return total / len(prompts)


def _groups(prompts: Sequence[TrainingPrompt], size: int) -> list[list[TrainingPrompt]]:
    """Prompts, grouped by similar length to keep padding small."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


@contextmanager
def _fast_products() -> Iterator[None]:
    """Let GPUs multiply fp32 matrices in TF32, whose rounding is far smaller than what training changes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Disable gradients of a model's own parameters, and enable them again afterwards."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def chunk_starts(prompt: TrainingPrompt, ratio: float) -> list[int]:
    """Positions of the first tokens of every chunk, equally many in each, up to ``ratio`` of all chunk tokens."""
    budget = int(ratio * sum(map(len, prompt.chunks)) / len(prompt.chunks))
    return [position for span in prompt.chunks for position in span.positions[:budget]]
