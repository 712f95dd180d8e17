"""Everything that decides what an evaluation gives: prompts, cells, model. Made, and checked, before any work."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kvmosaic
from kvmosaic.blend import POLICIES, policy_named
from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.eval.base import Cell, Example

NONE, ALL, RANDOM = Cell("none", 0.0), Cell("all", 1.0), "random"
FULL_PREFILL, NO_CONTEXT = Cell("full prefill", 1.0), Cell("no context", 0.0)
"""What cells are held against: the two ends of the scale. They use no chunk cache."""

DEFAULT_POLICIES = tuple(name for name in POLICIES if name not in (NONE.policy, ALL.policy, RANDOM))
DEFAULT_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.3)


class Question(NamedTuple):
    """An example as token ids, with its documents and without."""

    prompt: ChunkedPrompt
    no_context: ChunkedPrompt
    answers: tuple[str, ...]


class Plan(NamedTuple):
    """What is measured: all cells on every question."""

    questions: tuple[Question, ...]
    cells: tuple[Cell, ...]
    max_answer: int
    """Tokens generated at most."""
    digest: str
    """Of everything that results depend on: model, questions, cells, and the code that computes them."""


def make_cells(policies: Sequence[str], ratios: Sequence[float]) -> tuple[Cell, ...]:
    """Every policy at every ratio, beside random ones, between nothing and everything recomputed."""
    for ratio in ratios:
        if not 0 < ratio < 1:
            raise ConfigError(f"ratio {ratio}: must lie between 0 and 1; both ends are always measured")
    for policy in policies:
        policy_named(policy)
    wanted = [policy for policy in policies if policy not in (NONE.policy, ALL.policy)]
    between = [Cell(policy, ratio) for policy in (RANDOM, *wanted) for ratio in sorted(ratios)]
    return tuple(dict.fromkeys([NONE, *between, ALL]))


def make_plan(llm: LLM, examples: Sequence[Example], cells: Sequence[Cell], max_answer: int) -> Plan:
    """Parse every prompt; one that the model cannot take is refused here."""
    if max_answer < 1:
        raise ConfigError(f"--max-answer {max_answer}: must be at least 1")
    questions = tuple(_question(llm, index, example, max_answer) for index, example in enumerate(examples, 1))
    config = llm.config
    digest = _digest(
        {
            "code": _code_digest(),
            "weights": llm.engine.weights,
            "model": llm.engine.fingerprint(1),
            "device": str(llm.model.device),
            "sink": llm.chunk_cache.sink,
            "chunk_context": config.chunk_context,
            "questions": [
                (q.prompt.token_ids, [(s.start, s.end) for s in q.prompt.chunks], *q[1:]) for q in questions
            ],
            "cells": cells,
            "max_answer": max_answer,
        }
    )
    return Plan(questions, tuple(cells), max_answer, digest)


def _question(llm: LLM, number: int, example: Example, max_answer: int) -> Question:
    prompt = llm.parser.parse(llm.chat_prompt(example.system, example.chunks, example.question))
    length = len(prompt.token_ids)
    if not prompt.chunks:
        raise PromptError(f"example {number}: all of its chunks are empty")
    if llm.max_positions is not None and length + max_answer > llm.max_positions:
        raise PromptError(
            f"example {number}: {length} tokens + an answer of {max_answer} exceed the model's {llm.max_positions} "
            "positions; leave it out or shorten it"
        )
    if not llm.chunk_cache.serves(length):
        raise PromptError(
            f"example {number}: the model's rope table is different for every prompt of {length} tokens"
        )
    plain = llm.parser.encode(llm.chat_prompt(example.system, (), example.question))
    return Question(prompt, ChunkedPrompt(tuple(plain), ()), example.answers)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=vars).encode()).hexdigest()[:16]


def _code_digest() -> str:
    """Changes with the code that results come from, so that those of an older policy are never taken for new ones."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in _code_files())).hexdigest()


def _code_files() -> Iterator[Path]:
    root = Path(kvmosaic.__file__).parent
    for part in ("blend", "core", "kernels", "engines/hf", "engines/chunk_cache.py", "eval"):
        yield from [root / part] if part.endswith(".py") else sorted((root / part).rglob("*.py"))
