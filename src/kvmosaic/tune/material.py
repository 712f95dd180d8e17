"""Training data of a sink: the user's documents and examples, some of which are held out to judge it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvmosaic.core.errors import ConfigError
from kvmosaic.eval.base import Example
from kvmosaic.tune.corpus import made_up
from kvmosaic.tune.lessons import Maker, from_documents, from_examples
from kvmosaic.tune.passages import MIN_WORDS, split_into_passages

MIN_PASSAGES = 20
"""Minimum number of training passages from the user's documents; with fewer, held-out ones would say nothing."""
MIN_EXAMPLES = 4
"""Minimum number of examples to learn from, and of held-out examples."""
EXAMPLES_SHARE = 3
"""Lessons from examples for each made-up lesson, because real questions are nearest to those that users ask."""
HELD_OUT = 8
"""One in this many documents is held out and never trained on."""


@dataclass(frozen=True)
class Material:
    """Makers of lessons: those to learn from, and those with held-out texts."""

    learned: tuple[Maker, ...]
    held_out: tuple[Maker, ...]
    digest: str
    """Digest of all texts."""

    @classmethod
    def of(
        cls, documents: Sequence[str], learned: Sequence[Example], judged: Sequence[Example], seed: int
    ) -> "Material":
        """Lessons to learn from are made up, about the user's ``documents``, and with the questions of ``learned``.
        Held-out lessons are about held-out documents and ``judged``, which shares no document with
        ``learned``; if there are neither, they are made up."""
        rng = random.Random(seed)
        makers: list[Maker] = [made_up]
        judges: list[Maker] = []
        if documents:
            held_out = _held_out(documents)
            passages: tuple[list[str], list[str]] = ([], [])
            for document in documents:
                passages[document in held_out].extend(split_into_passages(document, rng))
            if len(passages[0]) < MIN_PASSAGES or not passages[1]:
                raise ConfigError(
                    f"too few documents: {len(documents)}, with {sum(map(len, passages))} passages; give at "
                    f"least two documents with {2 * MIN_PASSAGES} passages of {MIN_WORDS} words or more"
                )
            makers.append(from_documents(passages[0]))
            judges.append(from_documents(passages[1]))
        if learned or judged:
            if min(len(learned), len(judged)) < MIN_EXAMPLES:
                raise ConfigError(
                    f"too few examples: {len(learned)} to learn from and {len(judged)} held out; give at least "
                    f"{4 * HELD_OUT} with different documents"
                )
            makers += [from_examples(learned)] * EXAMPLES_SHARE
            judges.append(from_examples(judged))
        texts = [*documents, *(f"{each}" for each in (*learned, *judged))]
        digest = xxhash.xxh3_128("\0".join(texts).encode(errors="surrogatepass")).hexdigest()
        return cls(tuple(makers), tuple(judges) or (made_up,), digest)


def is_held_out(text: str) -> bool:
    """Whether a text is never trained on. Its content decides, so that it is on the same side in every run."""
    return _number(text) % HELD_OUT == 0


def _held_out(documents: Sequence[str]) -> set[str]:
    """The documents that are never trained on, at least one."""
    return {document for document in documents if is_held_out(document)} or {min(documents, key=_number)}


def _number(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass"))
