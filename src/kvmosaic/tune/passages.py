"""Lessons from texts without questions: recall, quotation and gaps."""

import random
import re
from collections.abc import Sequence

from kvmosaic.tune.base import Lesson, Question

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
EXAMPLES = (0, 1, 3, 7)
"""Numbers of questions of a lesson that come with their answers, before the one that the model answers."""
LEADS = ("Answer:", "Answer:", "")
"""Beginnings of answers that are given to the model."""
OPEN_QUESTIONS = (
    "Summarise the documents in one sentence.",
    "What is the first document about?",
    "What is the last document about?",
    "Which names are mentioned above?",
    "Write a title for each of the texts.",
    "What is the most important fact here, and why?",
    "Explain this to a child.",
)
"""Questions about any text."""
OPEN = 0.3
"""Share of the lessons about passages that have such a question."""

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
    if rng.random() < OPEN:
        asked = [Question(rng.choice(OPEN_QUESTIONS), "", "")]
    else:
        count = 1 + rng.choice(EXAMPLES)
        asked = [rng.choice((_recall, _recall, _quote, _gap))(rng.choice(passages), rng) for _ in range(count)]
    return lesson(rng.choice(SYSTEMS), passages, asked, kind)


def lesson(system: str, documents: Sequence[str], asked: Sequence[Question], kind: str) -> Lesson:
    """A lesson with questions. All but the last come with their answers."""
    *before, last = asked
    lines = [f"{other.text}\n{other.lead} {other.answer}\n" for other in before]
    return Lesson(system, tuple(documents), "".join([*lines, last.text]), last.lead, kind)


def _words(passage: str) -> list[str]:
    """Words with the spaces after them, or pieces of a text with hardly any spaces."""
    words = re.findall(r"\S+\s*", passage)
    if len(words) >= count_words(passage):
        return words
    return [passage[start : start + WORD] for start in range(0, len(passage), WORD)]


def _recall(passage: str, rng: random.Random) -> Question:
    words = _words(passage)
    at = rng.randrange(max(1, len(words) - 16))
    asked, answer = ("".join(words[start:end]).strip() for start, end in ((at, at + 6), (at + 6, at + 18)))
    return Question(f'Question: What follows "{asked}"?', rng.choice(LEADS), answer or "nothing")


def _quote(passage: str, rng: random.Random) -> Question:
    words = _words(passage)
    at = rng.randrange(max(1, len(words) // 2))
    begin, end = ("".join(words[start:stop]).strip() for start, stop in ((at, at + 5), (at + 5, at + 20)))
    return Question("Quote one of the documents.", begin, end)


def _gap(passage: str, rng: random.Random) -> Question:
    words = _words(passage)
    at = min(rng.randrange(3, max(4, len(words) - 3)), len(words) - 1)
    around = "".join([*words[max(0, at - 8) : at], "___ ", *words[at + 1 : at + 6]]).strip()
    return Question(f'Question: Which word is missing in "{around}"?', "Answer:", words[at].strip())
