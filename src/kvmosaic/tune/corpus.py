"""Made-up lessons of many kinds, so that a sink suits more than one: records, logs, chats, code, languages."""

import ast
import importlib.util
import random
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

from kvmosaic.eval.synthetic import synthetic
from kvmosaic.eval.world import KINDS, PEOPLE
from kvmosaic.tune.base import Lesson, Question
from kvmosaic.tune.passages import LEADS, SYSTEMS, lesson, lesson_about
from kvmosaic.tune.texts import CHAT, DAYS, LANGUAGES, MAX_SOURCE, MIN_SOURCE, MODULES, REPLIES


def made_up(rng: random.Random, max_words: int) -> Lesson:
    """A lesson of a random kind. It may have more than ``max_words`` words."""
    return rng.choice(MAKERS)(rng)


def _facts(rng: random.Random) -> Lesson:
    example = synthetic(1, rng.randrange(2**31), rng.choice((1, 2, 3)))[0]
    asked = Question(example.question, rng.choice((example.lead, *LEADS)), f"{example.answers[0]}.")
    return lesson(example.system, example.chunks, [asked], "facts")


def _records(rng: random.Random) -> Lesson:
    """Keys and values, as JSON, as lines, or as a table."""
    form = rng.choice(('"{}": "{}",', "{} = {}", "{}: {}", "{}\t{}", "| {} | {} |"))
    made = rng.choice((_identifier, _identifier, _word, _number))
    pairs = [(made(rng), rng.choice((made, _word, _number))(rng)) for _ in range(rng.randint(8, 40))]
    chunks = rng.randint(1, 6)
    size = -(-len(pairs) // chunks)
    documents = [
        "\n".join(form.format(*pair) for pair in pairs[start : start + size]) for start in range(0, len(pairs), size)
    ]
    asked = []
    for key, value in rng.sample(pairs, rng.choice((1, 1, 3))):
        question = rng.choice(("Repeat the record of one key.", f"Question: What is the value of {key}?"))
        lead, end = form.format(key, "\0").split("\0")
        asked.append(Question(question, lead.rstrip(), f"{value}{end}"))
    return lesson("Find the value of the key in the data.", documents, asked, "records")


def _identifier(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _word(rng: random.Random) -> str:
    return f"{rng.choice(KINDS).noun}_{rng.choice(PEOPLE).split()[0].lower()}_{rng.randrange(100)}".replace(" ", "_")


def _number(rng: random.Random) -> str:
    return f"{rng.uniform(0, 10 ** rng.randint(1, 6)):.{rng.randint(0, 3)}f}"


def _log(rng: random.Random) -> Lesson:
    def line() -> str:
        when = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}T{rng.randrange(24):02}:{rng.randrange(60):02}"
        level = rng.choice(("INFO", "WARNING", "ERROR", "DEBUG"))
        return f"{when} {level} {_word(rng)} took {rng.randrange(9999)} ms (request {rng.randrange(10**6)})"

    documents = ["\n".join(line() for _ in range(rng.randint(4, 14))) for _ in range(rng.randint(1, 5))]
    chosen = rng.choice(rng.choice(documents).split("\n"))
    asked = f"Question: What does the log say about request {chosen.rsplit(' ', 1)[1].rstrip(')')}?"
    return lesson(rng.choice(SYSTEMS), documents, [Question(asked, rng.choice(LEADS), chosen)], "log")


def _chat(rng: random.Random) -> Lesson:
    sessions, questions = [], []
    for _ in range(rng.randint(2, 8)):
        lines = [f"Session on {rng.choice(DAYS)}, {rng.randint(1, 28)}/{rng.randint(1, 12)}/2025"]
        for _ in range(rng.randint(2, 6)):
            said, question, answer = rng.choice(CHAT)
            kind = rng.choice(KINDS)
            values = {
                "noun": kind.noun,
                "article": "an" if kind.noun[0] in "aeiou" else "a",
                "name": rng.choice(kind.names),
                "person": rng.choice(PEOPLE),
                "day": rng.choice(DAYS),
                "small": rng.randint(2, 9),
                "large": rng.randint(20, 90),
            }
            lines += [f"User: {said.format(**values)}", f"Assistant: {rng.choice(REPLIES).format(**values)}"]
            asked = question.format(**values), rng.choice(LEADS), answer.format(**values)
            questions.append(Question(f"Question: {asked[0]}", *asked[1:]))
        sessions.append("\n".join(lines))
    return lesson(
        rng.choice(SYSTEMS), sessions, rng.sample(questions, min(len(questions), rng.choice((1, 1, 1, 2, 4)))), "chat"
    )


def _languages(rng: random.Random) -> Lesson:
    sentences, question = LANGUAGES[rng.choice([*LANGUAGES])]
    people = rng.sample(PEOPLE, rng.randint(2, 5))
    documents, known = [], []
    for person in people:
        told = rng.sample(sentences, rng.randint(2, len(sentences)))
        values = {"person": person, "small": rng.randint(2, 9), "large": rng.randint(20, 90)}
        told = [each.format(name=rng.choice(rng.choice(KINDS).names), **values) for each in told]
        documents.append(" ".join(told))
        known.append(Question(question.format(person=person), rng.choice(LEADS), rng.choice(told)))
    rng.shuffle(documents)
    return lesson(rng.choice(SYSTEMS), documents, rng.sample(known, rng.choice((1, 1, 2))), "languages")


@cache
def _functions() -> list[str]:
    """Sources of functions and small classes."""
    return list(dict.fromkeys(source for name in MODULES for source in _sources(name)))


def _sources(module: str) -> list[str]:
    """Sources of the functions and small classes of a module; none if this Python lacks the module or its source."""
    try:
        spec = importlib.util.find_spec(module)
        text = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
        nodes = ast.parse(text).body
    except (ImportError, OSError, ValueError, SyntaxError):
        return []
    lines = text.splitlines(keepends=True)
    found = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    sources = ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in found]
    return [source for source in sources if MIN_SOURCE < len(source) < MAX_SOURCE]


def _code(rng: random.Random) -> Lesson:
    sources = _functions()
    if len(sources) < 8:
        return _records(rng)
    return lesson_about(rng.sample(sources, rng.randint(1, 5)), rng, "code")


MAKERS: tuple[Callable[[random.Random], Lesson], ...] = (
    _facts,
    _records,
    _records,
    _log,
    _chat,
    _chat,
    _languages,
    _languages,
    _code,
    _code,
)
"""Makers of lessons, by kind. Kinds that are drawn more often occur several times."""
