"""Lessons from texts without questions: recall, quotation and gaps."""

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
"""System prompts of lessons."""
MIN_WORDS, MAX_WORDS = 12, 320
"""Minimum and approximate maximum number of words of a passage."""
WORD = 6
"""Number of characters of a piece that stands for a word in texts without spaces between words."""
MOST_QUESTIONS = 8
"""Maximum number of questions of a lesson; all but the last come with their answers."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")


def count_words(text: str) -> int:
    """Number of words of a text, or an estimate if there are no spaces between words."""
    return max(len(text.split()), len(text) // (2 * WORD))


def split_into_passages(text: str, rng: random.Random) -> list[str]:
    """Consecutive passages of a text, of random lengths, cut between sentences or lines."""
    passages: list[str] = []
    limit, begin, words = _limit(rng), 0, 0
    last = 0
    for match in (*_SENTENCE_END.finditer(text), None):
        end = len(text) if match is None else match.start()
        words += count_words(text[last:end])
        last = end
        if words >= limit or match is None:
            if (passage := text[begin:end].strip()) and count_words(passage) >= MIN_WORDS:
                passages.append(passage[: 2 * WORD * MAX_WORDS])
            limit, begin, words = _limit(rng), end, 0
    return passages


def _limit(rng: random.Random) -> int:
    """Random length of a passage, in words; short ones are more frequent than long ones."""
    return int(MIN_WORDS * (MAX_WORDS / MIN_WORDS) ** rng.random())


def lesson_about(passages: Sequence[str], rng: random.Random, kind: str) -> Lesson:
    """A lesson with these documents, about some of them."""
    count = rng.randint(1, MOST_QUESTIONS)
    asked = [rng.choice((_recall, _recall, _quote, _gap))(rng.choice(passages), rng) for _ in range(count)]
    return lesson(rng.choice(SYSTEMS), passages, asked, kind)


def lesson(system: str, documents: Sequence[str], asked: Sequence[tuple[str, str]], kind: str) -> Lesson:
    """A lesson with questions and answers. The last answer is the model's turn."""
    *before, (question, answer) = asked
    lines = [f"{other}\nAnswer: {right}\n" for other, right in before]
    return Lesson(system, tuple(documents), "".join([*lines, question]), f"Answer: {answer}", kind)


def _words(passage: str) -> list[str]:
    """Words with the spaces after them, or pieces of a text with hardly any spaces."""
    words = re.findall(r"\S+\s*", passage)
    if len(words) >= count_words(passage):
        return words
    return [passage[start : start + WORD] for start in range(0, len(passage), WORD)]


def _recall(passage: str, rng: random.Random) -> tuple[str, str]:
    words = _words(passage)
    at = rng.randrange(max(1, len(words) - 16))
    asked, answer = ("".join(words[start:end]).strip() for start, end in ((at, at + 6), (at + 6, at + 18)))
    return f'Question: What follows "{asked}"?', answer or "nothing"


def _quote(passage: str, rng: random.Random) -> tuple[str, str]:
    words = _words(passage)
    at = rng.randrange(1, max(2, len(words) // 2))
    return "Quote one of the documents.", "".join(words[at : at + 20]).strip()


def _gap(passage: str, rng: random.Random) -> tuple[str, str]:
    words = _words(passage)
    at = min(rng.randrange(3, max(4, len(words) - 3)), len(words) - 1)
    around = "".join([*words[max(0, at - 8) : at], "___ ", *words[at + 1 : at + 6]]).strip()
    return f'Question: Which word is missing in "{around}"?', words[at].strip()
