"""The plan of an evaluation: the prompts, cells and model that decide its results. Made and checked before any
work."""

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import kvmosaic
from kvmosaic.blend import POLICIES, policy_named
from kvmosaic.core.accelerator import accelerator_of
from kvmosaic.core.discovery import MIN_RUN
from kvmosaic.core.errors import ConfigError, PromptError
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.engines.hf.sampling import stop_ids
from kvmosaic.eval.base import Cell, Example
from kvmosaic.eval.found import asked_about, found_in

NONE, ALL, RANDOM = Cell("none", 0.0), Cell("all", 1.0), "random"
FULL_PREFILL, NO_CONTEXT = Cell("full prefill", 1.0), Cell("no context", 0.0)
"""References that cells are compared with: the two ends of the scale. They use no chunk cache."""

DEFAULT_POLICIES = tuple(name for name in POLICIES if name not in (NONE.policy, ALL.policy, RANDOM))
NAMED, AUTO = "documents", "auto"
"""Ways to find the chunks of prompts, called as in the setting ``chunk_sources``."""
SHORT_ANSWER, LONG_ANSWER = 16, 64
"""Minimum and maximum tokens that an answer is given, however many the right one needs."""


class Question(NamedTuple):
    """An example as token ids, with its documents and without."""

    prompt: ChunkedPrompt
    no_context: ChunkedPrompt
    answers: tuple[str, ...]
    max_answer: int
    """Maximum number of generated tokens."""


class Plan(NamedTuple):
    """The questions and the cells. Every cell is measured on every question."""

    questions: tuple[Question, ...]
    cells: tuple[Cell, ...]
    digest: str
    """Digest of everything that results depend on: model, questions, cells, and the code that computes them."""


def make_cells(policies: Sequence[str], ratios: Sequence[float]) -> tuple[Cell, ...]:
    """Every policy, and random tokens, at every ratio; before them nothing recomputed, after them everything."""
    for ratio in ratios:
        if not 0 <= ratio <= 1:
            raise ConfigError(f"--ratios {ratio:g}: must be between 0 and 1")
    for policy in policies:
        policy_named(policy)
    wanted = [policy for policy in policies if policy not in (NONE.policy, ALL.policy)]
    # Both ends are the same for all policies, and always measured.
    inner = sorted(ratio for ratio in ratios if 0 < ratio < 1)
    between = [Cell(policy, ratio) for policy in (RANDOM, *wanted) for ratio in inner]
    return tuple(dict.fromkeys([NONE, *between, ALL]))


def make_plan(
    llm: LLM,
    examples: Sequence[Example],
    cells: Sequence[Cell],
    max_answer: int | None = None,
    sources: str = NAMED,
) -> Plan:
    """Parse every prompt. Prompts and policies that the model cannot handle are refused here. Without ``max_answer``,
    each answer may be as long as the right one, within ``SHORT_ANSWER`` and ``LONG_ANSWER``. ``sources``: ``NAMED``
    or ``AUTO``."""
    questions = tuple(_question(llm, index, examples, max_answer, sources) for index in range(len(examples)))
    for cell in cells:
        policy_named(cell.policy).check(llm.engine.format.layers)
    config = llm.config
    digest = _digest(
        {
            "code": _code_digest(),
            "weights": llm.engine.weights,
            "model": llm.engine.fingerprint(1),
            "device": _device_name(llm.model.device),
            "libraries": (torch.__version__, transformers.__version__),
            "stops": sorted(stop_ids(llm.model)),
            "sink": llm.chunk_cache.sink_identity,
            "chunk_context": config.chunk_context,
            "entry_dtype": config.entry_dtype,
            "questions": [
                (q.prompt.token_ids, [(s.start, s.end) for s in q.prompt.chunks], *q[1:]) for q in questions
            ],
            "cells": cells,
        }
    )
    return Plan(questions, tuple(cells), digest)


def _device_name(device: torch.device) -> str:
    module = accelerator_of(device)
    return str(device) if module is None else str(module.get_device_name(device))


def _question(llm: LLM, index: int, examples: Sequence[Example], max_answer: int | None, sources: str) -> Question:
    example = examples[index]
    if sources == AUTO:
        prompt = found_in(llm, index, examples)
    else:
        asked = asked_about(llm, example, example.chunks)
        prompt = llm.parser.parse_named(asked.token_ids, asked.documents, asked.question).prompt
    if max_answer is None:
        # As the model writes it: after a space, and followed by the end of the line.
        needed = max(len(llm.parser.encode(f" {answer}.\n")) for answer in example.answers)
        max_answer = min(max(needed, SHORT_ANSWER), LONG_ANSWER)
    length = len(prompt.token_ids)
    # Examples are drawn from a file at random, so the number alone does not identify one.
    name = f"example {index + 1} ({example.question[-60:]!r})"
    if not prompt.chunks:
        limit = "min_chunk_tokens" if sources == NAMED else f"chunk_sources=auto needs at least {MIN_RUN} tokens"
        raise PromptError(f"{name}: all of its chunks are empty or too short ({limit}); leave it out")
    if llm.max_positions is not None and length + max_answer > llm.max_positions:
        raise PromptError(
            f"{name}: {length} tokens + an answer of {max_answer} exceed the model's {llm.max_positions} "
            "positions; leave it out or shorten it"
        )
    if not llm.chunk_cache.serves(length):
        raise PromptError(
            f"{name}: the model's rope table depends on the prompt's length at {length} tokens; shorten it"
        )
    context = llm.chunk_cache.context_of(prompt)
    # A chunk that does not fit is computed like ordinary text, and would count as perfect reuse.
    if not all(llm.chunk_cache.fits(len(span), context, length) for span in prompt.chunks):
        raise PromptError(
            f"{name}: a chunk and the prefix of {len(context)} tokens before it exceed the model's positions; "
            "choose a shorter sink prefix"
        )
    plain = ChunkedPrompt(tuple(asked_about(llm, example, ()).token_ids), ())
    return Question(prompt, plain, example.answers, max_answer)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=vars).encode()).hexdigest()[:16]


def _code_digest() -> str:
    """Digest of the code that results come from, so that results of an older policy are never taken for new ones.
    Comments and docstrings do not count."""
    digest = hashlib.sha256()
    for path in _code_files():
        digest.update(ast.dump(_WithoutTexts().visit(ast.parse(path.read_bytes()))).encode())
    return digest.hexdigest()


class _WithoutTexts(ast.NodeTransformer):
    """Removes docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def _code_files() -> Iterator[Path]:
    root = Path(kvmosaic.__file__).parent
    for folder in ("blend", "core", "kernels", "engines/hf", "eval"):
        yield from sorted((root / folder).rglob("*.py"))
    yield from sorted((root / "engines").glob("*.py"))
    yield root / "models" / "sink_file.py"
