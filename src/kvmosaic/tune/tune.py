"""Learns a sink for a model, from beginning to end."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from kvmosaic import __version__
from kvmosaic.core.errors import ConfigError, UnsupportedModelError
from kvmosaic.core.learned_sink import LearnedSink, SinkAbout
from kvmosaic.core.sink import sink_tokens
from kvmosaic.engines.chunk_cache import KV
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.engines.identity import model_name
from kvmosaic.models.sink_file import save_sink
from kvmosaic.tune.base import TrainingPrompt
from kvmosaic.tune.lessons import Lessons
from kvmosaic.tune.material import Material
from kvmosaic.tune.train import DivergedError, Progress, Recipe, SinkTrainer

SAVE_SECONDS = 60.0
"""Seconds between two saves of the run's state."""
MIN_PROMPT = 256
"""Tokens that a training prompt needs at least."""
HELD_OUT_SEED = 1_000_003
"""Added to the seed for prompts that are never trained on."""


@dataclass(frozen=True)
class Tuned:
    """What a run gave."""

    path: Path
    kl_before: float
    """Mean KL on held-out prompts with the default text sink, nothing recomputed."""
    kl_after: float
    steps: int


@dataclass(frozen=True)
class Look:
    """A look at held-out prompts in the middle of a run."""

    progress: Progress
    held_out_kl: float | None
    """As of the latest look; ``None`` before the first."""


def tune(
    llm: LLM,
    material: Material,
    data: list[str],
    recipe: Recipe,
    tokens: int,
    output: Path,
    show: Callable[[Look], None] = lambda look: None,
) -> Tuned:
    """Learn a sink of ``tokens`` tokens and write it to ``output``, unless it is no better than the text. A run that
    was interrupted is continued: its state is beside ``output``."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lessons = partial(Lessons, llm.parser, llm.tokenizer, max_tokens=_max_tokens(llm, tokens, recipe.max_prompt))
    held_out = lessons(material.held_out, seed=recipe.seed + HELD_OUT_SEED)
    judged = [held_out[number] for number in range(recipe.judged)]
    text = _text_tokens(llm)
    before = SinkTrainer(llm.engine, _kv(llm, text), recipe).evaluate(judged)
    trainer = SinkTrainer(llm.engine, _kv(llm, _lengthened(text, tokens)), recipe)
    state = _state_file(llm, output, data, recipe, tokens)
    if state.exists():
        trainer.restore(state)
    after = _train(trainer, lessons(material.learned, seed=recipe.seed), judged, before, state, show)
    if not after < before:
        state.unlink(missing_ok=True)
        raise DivergedError(
            f"held-out KL is {after:.4f} after tuning and {before:.4f} with the text: nothing was written; give more "
            "or other documents, or more minutes"
        )
    save_sink(_learned(llm, trainer, data, recipe, before, after), output)
    state.unlink(missing_ok=True)
    return Tuned(output, before, after, trainer.step)


def _train(
    trainer: SinkTrainer,
    lessons: Lessons,
    judged: list[TrainingPrompt],
    before: float,
    state: Path,
    show: Callable[[Look], None],
) -> float:
    """Held-out KL at the end. A run that makes things worse is given up."""
    held_out: float | None = None
    saved = time.monotonic()
    quarter = 0
    try:
        for progress in trainer.run(lessons):
            if quarter < int(4 * progress.share) < 4:
                quarter = int(4 * progress.share)
                held_out = trainer.evaluate(judged)
                if not held_out < trainer.DIVERGED * before:
                    state.unlink(missing_ok=True)
                    raise DivergedError(
                        f"held-out KL rose from {before:.4f} to {held_out:.4f} in {progress.step} steps: nothing was "
                        "written; look at the data, or try another --seed"
                    )
            show(Look(progress, held_out))
            if time.monotonic() - saved > SAVE_SECONDS:
                trainer.save(state)
                saved = time.monotonic()
    except KeyboardInterrupt:
        trainer.save(state)
        raise
    return trainer.evaluate(judged)


def _learned(
    llm: LLM, trainer: SinkTrainer, data: list[str], recipe: Recipe, before: float, after: float
) -> LearnedSink:
    half = torch.bfloat16  # what is lost by rounding is far below what another seed changes
    k, v = (part.detach().transpose(0, 1).to("cpu", half).contiguous() for part in trainer.sink)
    about = SinkAbout(
        model=model_name(llm.model.name_or_path) if llm.model.name_or_path else type(llm.model).__name__,
        data=data,
        recipe=asdict(recipe),
        kl_before=round(before, 6),
        kl_after=round(after, 6),
        kvmosaic=__version__,
    )
    return LearnedSink(k, v, llm.engine.witness().float().cpu(), about)


def _max_tokens(llm: LLM, tokens: int, most: int) -> int:
    """Of a training prompt: ``most``, or what the model's positions leave behind a sink of ``tokens``."""
    limit = llm.max_positions or most + tokens
    room = min(most, limit - tokens)
    if room < MIN_PROMPT:
        raise ConfigError(f"--tokens {tokens}: leaves {room} of the model's {limit} positions; choose fewer")
    if llm.engine.fingerprint(room) is None:
        raise UnsupportedModelError("the model's rotary table is another one for every length of prompt")
    return room


def _text_tokens(llm: LLM) -> list[int]:
    """The tokens of the default text sink."""
    assert llm.tokenizer is not None
    encode = partial(llm.tokenizer.encode, add_special_tokens=False)
    return sink_tokens("document", None, llm.model.generation_config.bos_token_id, encode)


def _lengthened(text: list[int], tokens: int) -> list[int]:
    """The first ``tokens`` of the text, which is repeated if it is too short; BOS comes once."""
    return [*text, *(text[1:] * (tokens // max(1, len(text) - 1) + 1))][:tokens]


def _kv(llm: LLM, tokens: list[int]) -> KV:
    [computed] = llm.engine.fill((), [tokens], len(tokens))
    return computed


def _state_file(llm: LLM, output: Path, data: list[str], recipe: Recipe, tokens: int) -> Path:
    """Named after everything that the run depends on, so that another run does not go on with it."""
    about = json.dumps([llm.engine.weights, data, asdict(recipe), tokens])
    return output.with_name(f".{output.name}.{hashlib.sha256(about.encode()).hexdigest()[:12]}.state")
