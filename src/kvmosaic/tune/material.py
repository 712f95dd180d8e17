"""What a sink is learned from: the user's documents and examples, some of which are kept for the judgement."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvmosaic.core.errors import ConfigError
from kvmosaic.eval.base import Example
from kvmosaic.tune.corpus import made_up
from kvmosaic.tune.lessons import Maker, from_documents, from_examples
from kvmosaic.tune.passages import split_into_passages

MIN_PASSAGES = 20
"""Passages of the user's documents, at least: with fewer, held-out ones would say nothing."""
HELD_OUT = 8
"""One in so many documents and examples is never trained on."""


@dataclass(frozen=True)
class Material:
    """Makers of lessons: those to learn from, and those to be judged by."""

    learned: tuple[Maker, ...]
    held_out: tuple[Maker, ...]

    @classmethod
    def of(cls, documents: Sequence[str], examples: Sequence[Example], seed: int) -> "Material":
        """Made-up lessons, and as many of the user's ``documents`` and of questions in ``examples``."""
        rng = random.Random(seed)
        learned: list[Maker] = [made_up]
        held_out: list[Maker] = [made_up]  # of other numbers: Lessons of another seed
        passages: tuple[list[str], list[str]] = ([], [])
        for document in documents:
            passages[_is_held_out(document)].extend(split_into_passages(document, rng))
        if documents:
            if len(passages[0]) < MIN_PASSAGES or not passages[1]:
                found = sum(map(len, passages))
                raise ConfigError(
                    f"too few documents: {len(documents)}, in which there are {found} passages; give more, at least "
                    f"{2 * HELD_OUT} documents with {MIN_PASSAGES} passages"
                )
            learned.append(from_documents(passages[0]))
            held_out.append(from_documents(passages[1]))
        if examples:
            parts: tuple[list[Example], list[Example]] = ([], [])
            for example in examples:
                parts[_is_held_out(example.question)].append(example)
            if min(map(len, parts)) < 2:
                raise ConfigError(f"too few examples: {len(examples)}; give at least {4 * HELD_OUT}")
            learned.append(from_examples(parts[0]))
            held_out.append(from_examples(parts[1]))
        return cls(tuple(learned), tuple(held_out))


def _is_held_out(text: str) -> bool:
    """By content, so that the same text is on the same side in every run."""
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass")) % HELD_OUT == 0
