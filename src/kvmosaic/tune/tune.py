"""Learns a sink for a model, from beginning to end."""

import hashlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kvmosaic import __version__
from kvmosaic.core.errors import ConfigError, UnsupportedModelError
from kvmosaic.core.learned_sink import LearnedSink, SinkAbout
from kvmosaic.engines.chunk_cache import KV
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.engines.identity import model_name
from kvmosaic.models.sink_file import load_sink, save_sink
from kvmosaic.tune.lessons import Lessons
from kvmosaic.tune.material import Material
from kvmosaic.tune.train import MAX_ANSWER, DivergedError, Progress, Recipe, SinkTrainer, answered, mean_kl

DIVERGED = 3.0
"""Held-out KL at which a run is stopped, relative to that of the text sink."""
SAVE_SECONDS = 60.0
"""Seconds between two saves of the run's state."""
MIN_PROMPT = 256
"""Minimum number of tokens that a training prompt needs."""
HELD_OUT_SEED = 1_000_003
"""Offset that is added to the seed for prompts that are never trained on."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuned:
    """Result of a run."""

    path: Path
    kl_before: float
    """Mean KL on held-out prompts with the default text sink, nothing recomputed."""
    kl_after: float
    steps: int


def tune(
    llm: LLM,
    material: Material,
    data: list[str],
    recipe: Recipe,
    tokens: int,
    output: Path,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Tuned:
    """Learn a sink of ``tokens`` tokens and write it to ``output``, unless it is no better than the text. An
    interrupted run is continued from its state, which is next to ``output``. ``data``: names of the training data."""
    output.parent.mkdir(parents=True, exist_ok=True)
    _check_that_it_may_be_replaced(output, llm)
    text = list(llm.chunk_cache.sink)
    max_tokens = _max_tokens(llm, max(tokens, len(text)), recipe.max_prompt)
    lessons = partial(Lessons, llm.parser, llm.tokenizer, max_tokens=max_tokens)
    held_out = lessons(material.held_out, seed=recipe.seed + HELD_OUT_SEED)
    judged = answered(llm.engine, [held_out[number] for number in range(recipe.judged)], recipe.together)

    def judge(sink: KV) -> float:
        return mean_kl(llm.engine, sink, judged, recipe.together)

    before = judge(_kv(llm, text))
    trainer = SinkTrainer(llm.engine, _kv(llm, _lengthened(text, tokens)), recipe)
    state = _state_file(llm, output, material, recipe, tokens)
    if state.exists():
        trainer.restore(state)
    try:
        _train(trainer, lessons(material.learned, seed=recipe.seed), judge, before, state, show)
        sink = _rounded(trainer.sink)
        after = judge(sink)
        if not after < before:
            raise DivergedError(
                f"held-out KL is {after:.4f} after tuning and {before:.4f} with the default text: nothing was "
                "written; give more or other documents, or more minutes"
            )
    except DivergedError:
        state.unlink(missing_ok=True)
        raise
    save_sink(_learned(llm, sink, data, recipe, before, after), output)
    state.unlink(missing_ok=True)
    return Tuned(output, before, after, trainer.step)


def _check_that_it_may_be_replaced(output: Path, llm: LLM) -> None:
    """Models of the same name have the same default file."""
    if not output.exists():
        return
    try:
        load_sink(output).check(llm.engine.format, llm.engine.witness(), llm.engine.share)
    except ConfigError:
        raise ConfigError(f"{output} is not a sink of this model; delete it, or choose another --output") from None


def _train(
    trainer: SinkTrainer,
    lessons: Lessons,
    judge: Callable[[KV], float],
    before: float,
    state: Path,
    show: Callable[[Progress], None],
) -> None:
    """Train to the end. A run that makes things worse is stopped. An interrupted run keeps its state."""
    held_out: float | None = None
    saved = time.monotonic()
    quarter = 0
    with _interrupted_between_steps() as is_interrupted:
        try:
            for progress in trainer.run(lessons):
                if is_interrupted():
                    raise KeyboardInterrupt
                if quarter < int(4 * progress.share) < 4:
                    quarter = int(4 * progress.share)
                    held_out = judge(trainer.sink)
                    if not held_out < DIVERGED * before:
                        raise DivergedError(
                            f"held-out KL rose from {before:.4f} to {held_out:.4f} in {progress.step} steps: nothing "
                            "was written; look at the data, or try another --seed"
                        )
                show(replace(progress, held_out_kl=held_out))
                if time.monotonic() - saved > SAVE_SECONDS:
                    try:
                        trainer.save(state)
                    except OSError as error:
                        logger.warning("%s; the run continues", error)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            trainer.save(state)
            raise
    trainer.save(state)  # the last evaluation takes a while, and may be interrupted


@contextmanager
def _interrupted_between_steps() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C to the end of a step, because half a step could not be saved. Yields a function that tells whether
    Ctrl-C was pressed. Signals reach only the main thread; in other threads the function always returns False."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _rounded(sink: KV) -> KV:
    """The numbers as a file stores them: rounded to bf16."""
    k, v = (part.detach().to(torch.bfloat16).float() for part in sink)
    return k, v


def _learned(llm: LLM, sink: KV, data: list[str], recipe: Recipe, before: float, after: float) -> LearnedSink:
    k, v = (part.transpose(0, 1).to("cpu", torch.bfloat16).contiguous() for part in sink)
    about = SinkAbout(
        model=model_name(llm.model.name_or_path) if llm.model.name_or_path else type(llm.model).__name__,
        data=data,
        recipe=asdict(recipe),
        kl_before=round(before, 6),
        kl_after=round(after, 6),
        kvmosaic=__version__,
    )
    return LearnedSink(k, v, llm.engine.witness().float().cpu(), about)


def _max_tokens(llm: LLM, sink: int, most: int) -> int:
    """Maximum tokens of a training prompt: ``most``, or the model's positions that ``sink`` tokens leave."""
    limit = llm.max_positions or most + sink + MAX_ANSWER
    room = min(most, limit - sink - MAX_ANSWER)
    if room < MIN_PROMPT:
        raise ConfigError(
            f"--tokens: a sink of {sink} tokens leaves only {room} of the model's {limit} positions; choose fewer"
        )
    if llm.engine.switches_tables or llm.engine.fingerprint(room + MAX_ANSWER) is None:
        # Keys that were learned with one table would be wrong with another.
        raise UnsupportedModelError("no sink can be learned: the model's rotary tables depend on a prompt's length")
    return room


def _lengthened(text: list[int], tokens: int) -> list[int]:
    """The first ``tokens`` of the text, which is repeated if it is too short; BOS comes once."""
    return [*text, *(text[1:] * (tokens // max(1, len(text) - 1) + 1))][:tokens]


def _kv(llm: LLM, tokens: list[int]) -> KV:
    [computed] = llm.engine.fill((), [tokens], len(tokens))
    return computed


def _state_file(llm: LLM, output: Path, material: Material, recipe: Recipe, tokens: int) -> Path:
    """The state file of a run. Its name depends on everything that the run depends on, so no other run uses it."""
    about = json.dumps([__version__, llm.engine.weights, material.digest, asdict(recipe), tokens, repr(llm.config)])
    return output.with_name(f".{output.name}.{hashlib.sha256(about.encode()).hexdigest()[:12]}.state")
