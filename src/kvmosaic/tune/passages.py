"""Lessons from texts that nobody asked questions about: recall, continuation and gaps."""

import random
import re
from collections.abc import Sequence

from kvmosaic.tune.base import Lesson

SYSTEMS = (
    "Read the documents and answer the question with a few words.",
    "You are a helpful assistant.",
    "Answer briefly, from the passages below.",
    "Use the following context.",
    "You are a careful expert. Think about the sources before you answer.",
    "Below are search results. Some of them may not matter.",
    "",
)
MIN_WORDS, MAX_WORDS = 12, 320
"""Words of a passage."""
MOST_QUESTIONS = 8
"""Questions of a lesson; all but the last come with their answers."""

_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n+")


def split_into_passages(text: str, rng: random.Random) -> list[str]:
    """Consecutive passages of a text, of random lengths, cut between sentences or lines."""
    passages: list[str] = []
    limit, begin, words = _limit(rng), 0, 0
    last = 0
    for match in (*_SENTENCE_END.finditer(text), None):
        end = len(text) if match is None else match.start()
        words += max(1, len(text[last:end].split()))
        last = end
        if words >= limit or match is None:
            if (passage := text[begin:end].strip()) and len(passage.split()) >= MIN_WORDS:
                passages.append(passage[: 12 * MAX_WORDS])
            limit, begin, words = _limit(rng), end, 0
    return passages


def _limit(rng: random.Random) -> int:
    """Many short passages, and some long ones."""
    return int(MIN_WORDS * (MAX_WORDS / MIN_WORDS) ** rng.random())


def lesson_about(passages: Sequence[str], rng: random.Random, kind: str) -> Lesson:
    """A lesson with these documents, about some of them."""
    count = rng.randint(1, MOST_QUESTIONS)
    asked = [rng.choice((_recall, _recall, _goes_on, _gap))(rng.choice(passages), rng) for _ in range(count)]
    return lesson(rng.choice(SYSTEMS), passages, asked, kind)


def lesson(system: str, documents: Sequence[str], asked: Sequence[tuple[str, str]], kind: str) -> Lesson:
    """A lesson with questions and answers, of which the last answer is the model's turn."""
    *before, (question, answer) = asked
    lines = [f"{other}\nAnswer: {right}\n" for other, right in before]
    return Lesson(system, tuple(documents), "".join([*lines, question]), f"Answer: {answer}", kind)


def _recall(passage: str, rng: random.Random) -> tuple[str, str]:
    words = passage.split()
    at = rng.randrange(max(1, len(words) - 16))
    return f'Question: What follows "{" ".join(words[at : at + 6])}"?', " ".join(words[at + 6 : at + 18]) or "nothing"


def _goes_on(passage: str, rng: random.Random) -> tuple[str, str]:
    words = passage.split()
    at = rng.randrange(1, max(2, len(words) // 2))
    return "Quote one of the documents.", f"{' '.join(words[at : at + 20])}"


def _gap(passage: str, rng: random.Random) -> tuple[str, str]:
    words = passage.split()
    at = rng.randrange(3, max(4, len(words) - 3))
    around = [*words[max(0, at - 8) : at], "___", *words[at + 1 : at + 6]]
    return f'Question: Which word is missing in "{" ".join(around)}"?', words[min(at, len(words) - 1)]
