"""Endless training prompts: lessons of all kinds, in the model's chat format."""

import random
from collections.abc import Callable, Sequence

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import Span
from kvmosaic.engines.hf.chat import chat_prompt
from kvmosaic.eval.base import Example
from kvmosaic.tune.base import Lesson, Question, TrainingPrompt
from kvmosaic.tune.passages import EXAMPLES, LEADS, SYSTEMS, count_words, lesson, lesson_about

Maker = Callable[[random.Random, int], Lesson]
"""Makes a lesson from a random generator and the approximate maximum number of words of its documents."""
BETWEEN = ("\n\n", "\n\n", "\n\n", "\n", "\n---\n")
"""Texts that may stand between documents."""
LABELS = ("", "", "", "[{}] ", "Document {}: ", "Source {}:\n")
"""Texts that may stand before a document."""
ALL_DOCUMENTS = 0.5
"""Share of the lessons from examples that have the documents of one example, most of which do not matter."""
MAX_SOURCES = 10
"""Maximum number of examples whose documents other lessons have."""
CLOZE = 0.2
"""Share of the lessons from examples that ask about any text of the documents instead."""
MAX_COMPARED = 400
"""Maximum number of tokens before the answer that are compared as well. Without them, sinks were worse."""
MAX_TRIES = 200
"""Maximum number of lessons that are made until one of them fits."""


def from_documents(passages: Sequence[str]) -> Maker:
    """Lessons about some of these passages at a time: consecutive or random ones."""

    def make(rng: random.Random, max_words: int) -> Lesson:
        count = min(len(passages), rng.randint(1, 10))
        start = rng.randrange(len(passages) - count + 1)
        chosen = passages[start : start + count] if rng.random() < 0.3 else rng.sample(passages, count)
        return lesson_about(_fitting(chosen, max_words), rng, "documents")

    return make


def from_examples(examples: Sequence[Example]) -> Maker:
    """Lessons with the questions of these examples: of one with all of its documents, or of several, with the
    documents that hold the answers."""

    def make(rng: random.Random, max_words: int) -> Lesson:
        chosen = rng.sample(examples, min(len(examples), MAX_SOURCES))
        if rng.random() < ALL_DOCUMENTS:
            chosen = chosen[:1]
            documents = _fitting(list(dict.fromkeys((_source(chosen[0]), *chosen[0].chunks))), max_words)
        else:
            documents = _fitting(list(dict.fromkeys(map(_source, chosen))), max_words)
            chosen = [example for example in chosen if _source(example) in documents]
        rng.shuffle(documents)
        if rng.random() < CLOZE:
            return lesson_about(_fitting(documents, max_words), rng, "examples")
        asked = [
            Question(example.question, example.lead or rng.choice(LEADS), example.answers[0])
            for example in chosen[: 1 + rng.choice(EXAMPLES)]
        ]
        return lesson(rng.choice((chosen[0].system, *SYSTEMS)), documents, asked, "examples")

    return make


def _source(example: Example) -> str:
    """The first document that holds an answer, or the first of all."""
    held = (text for text in example.chunks if any(answer in text for answer in example.answers))
    return next(held, example.chunks[0])


def _fitting(documents: Sequence[str], max_words: int) -> list[str]:
    """The first documents that together have at most ``max_words`` words, but at least one document."""
    kept, words = [documents[0]], count_words(documents[0])
    for document in documents[1:]:
        words += count_words(document)
        if words > max_words:
            break
        kept.append(document)
    return kept


class Lessons:
    """Prompts numbered from 0 on; the same number always gives the same prompt."""

    def __init__(
        self, parser: ChunkTokenParser, tokenizer: object, makers: Sequence[Maker], max_tokens: int, seed: int
    ) -> None:
        """``makers`` take turns at random; prompts have at most ``max_tokens``."""
        self._parser = parser
        self._tokenizer = tokenizer
        self._makers = makers
        self._max_tokens = max_tokens
        self._seed = seed

    def __getitem__(self, number: int) -> TrainingPrompt:
        rng = random.Random(f"{self._seed}/{number}")
        for attempt in range(MAX_TRIES):
            # Documents with about half as many words as tokens leave room for the question. Identifiers and code have
            # many more tokens than words, so there are fewer documents if they do not fit.
            made = rng.choice(self._makers)(rng, self._max_tokens // (2 + attempt // 4))
            prompt = self._prompt(made, rng)
            if prompt is not None:
                return prompt
        raise ConfigError(
            f"no lesson of {self._max_tokens} tokens has a chunk; give shorter documents, or a "
            "smaller min_chunk_tokens"
        )

    def _prompt(self, made: Lesson, rng: random.Random) -> TrainingPrompt | None:
        """The lesson in the model's chat format; ``None`` if it is too long, or has no chunk."""
        between, label = rng.choice(BETWEEN), rng.choice(LABELS)
        documents = [label.format(index) + document for index, document in enumerate(made.documents, 1)]
        messages = [{"role": "user", "content": between.join([*documents, made.question])}]
        if made.system:
            messages.insert(0, {"role": "system", "content": made.system})
        tokens = chat_prompt(self._tokenizer, messages, lead=made.lead).token_ids
        if len(tokens) > self._max_tokens:
            return None
        prompt = self._parser.parse_named(tokens, made.documents).prompt
        if not prompt.chunks:
            return None
        start = max(prompt.question.start, len(tokens) - 1 - MAX_COMPARED)
        return TrainingPrompt(tuple(tokens), prompt.chunks, Span(start, len(tokens)), made.kind)
