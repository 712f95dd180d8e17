"""Training prompts without end: lessons of all kinds, as the model reads them."""

import random
from collections.abc import Callable, Sequence

from kvmosaic.core.parser import ChunkTokenParser
from kvmosaic.core.prompt import Span
from kvmosaic.engines.hf.chat import chat_prompt
from kvmosaic.eval.base import Example
from kvmosaic.tune.base import Lesson, TrainingPrompt
from kvmosaic.tune.passages import SYSTEMS, lesson, lesson_about

Maker = Callable[[random.Random], Lesson]
BETWEEN = ("\n\n", "\n\n", "\n\n", "\n", "\n---\n")
"""What may stand between documents."""
LABELS = ("", "", "", "[{}] ", "Document {}: ", "Source {}:\n")
"""What may stand before them."""
MAX_COMPARED = 192
"""Tokens of questions and answers of which a prompt is judged; the last ones."""


def from_documents(passages: Sequence[str], kind: str = "documents") -> Maker:
    """Lessons about some of these passages at a time: neighbours of a text, or any."""

    def make(rng: random.Random) -> Lesson:
        count = min(len(passages), rng.randint(1, 10))
        if rng.random() < 0.3:
            start = rng.randrange(len(passages) - count + 1)
            return lesson_about(passages[start : start + count], rng, kind)
        return lesson_about(rng.sample(passages, count), rng, kind)

    return make


def from_examples(examples: Sequence[Example], kind: str = "examples") -> Maker:
    """Lessons with the questions and answers of these examples, and the documents of one or two of them."""

    def make(rng: random.Random) -> Lesson:
        chosen = rng.sample(examples, min(len(examples), rng.randint(1, 2)))
        documents = list(dict.fromkeys(text for example in chosen for text in example.chunks))
        rng.shuffle(documents)
        if rng.random() < 0.3:
            return lesson_about(documents, rng, kind)
        asked = [(example.question, example.answers[0]) for example in chosen]
        return lesson(rng.choice((chosen[0].system, *SYSTEMS)), documents, asked, kind)

    return make


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
        while True:
            made = rng.choice(self._makers)(rng)
            prompt = self._prompt(made, rng)
            if prompt is not None:
                return prompt

    def _prompt(self, made: Lesson, rng: random.Random) -> TrainingPrompt | None:
        """As the model reads it; with fewer documents where it is too long. ``None`` if nothing is left of it."""
        documents = list(made.documents)
        between, label = rng.choice(BETWEEN), rng.choice(LABELS)
        while documents:
            text = between.join(
                [*(label.format(index) + document for index, document in enumerate(documents, 1)), made.question]
            )
            messages = [{"role": "user", "content": text}]
            if made.system:
                messages.insert(0, {"role": "system", "content": made.system})
            tokens = chat_prompt(self._tokenizer, messages, lead=made.answer).token_ids
            if len(tokens) <= self._max_tokens:
                break
            documents.pop(rng.randrange(len(documents)))
        else:
            return None
        prompt = self._parser.parse_named(tokens, documents).prompt
        if not prompt.chunks:
            return None
        start = max(prompt.question.start, len(tokens) - MAX_COMPARED)
        return TrainingPrompt(tuple(tokens), prompt.chunks, Span(start, len(tokens)), made.kind)
