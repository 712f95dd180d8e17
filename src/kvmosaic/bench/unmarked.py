"""Made-up traffic in which documents are not marked. The same seed gives the same traffic."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvmosaic.bench.traffic import Corpus, popular, random_tokens

BEGIN, END = 1, 2
"""Tokens that begin and end a message."""
MARKERS = frozenset({BEGIN, END})
JOINT = [198, 198]
"""Tokens between two documents, like two line breaks."""
FILES, COMPACT_AT, KEPT = 30, 16_000, 3
"""Number of files that agents read; length in tokens at which an agent's history is replaced by a summary; number of
tool results that are kept then."""


@dataclass
class Unmarked:
    """A prompt of messages, and the places of its documents, which only the measurement knows."""

    ids: list[int] = field(default_factory=list)
    documents: list[tuple[int, int]] = field(default_factory=list)

    def say(self, role: int, *parts: Sequence[int], documents: Sequence[int] = ()) -> None:
        """Append a message; ``documents``: which of its parts are documents."""
        self.ids += [BEGIN, 10 + role]
        for index, part in enumerate(parts):
            if index in documents:
                self.documents.append((len(self.ids), len(self.ids) + len(part)))
            self.ids += part
        self.ids.append(END)

    def asked(self) -> "Unmarked":
        """A copy that ends where the answer begins."""
        return Unmarked([*self.ids, BEGIN, 12], list(self.documents))


SYSTEM, USER, ASSISTANT, TOOL = range(4)


def made_up(count: int, rng: random.Random) -> list[list[int]]:
    """Documents of 150 to 600 tokens."""
    return [random_tokens(rng, rng.randrange(150, 600)) for _ in range(count)]


def rag(documents: Sequence[list[int]], rng: random.Random, *, labels: bool = False) -> Iterator[Unmarked]:
    """Endless questions to a RAG chain: five documents by Zipf's law, in random order, each after two line breaks;
    with ``labels``, also after its number."""
    system = random_tokens(rng, 60)
    numbers = [random_tokens(rng, 4) for _ in range(5)]
    for drawn in popular(Corpus(len(documents), 1, 5), rng):
        parts: list[list[int]] = []
        for place, number in enumerate(drawn):
            parts += [[*JOINT, *numbers[place]] if labels else JOINT, documents[number]]
        prompt = Unmarked()
        prompt.say(SYSTEM, system)
        prompt.say(USER, *parts, JOINT, random_tokens(rng, 20), documents=range(1, len(parts), 2))
        yield prompt.asked()


def chat(documents: Sequence[list[int]], rng: random.Random) -> Iterator[Unmarked]:
    """Endless turns of four conversations at a time, each of eight turns with three documents in every question."""
    system = random_tokens(rng, 60)
    queries = popular(Corpus(len(documents), 1, 3), rng)
    running: list[tuple[Unmarked, int]] = []
    while True:
        while len(running) < 4:
            running.append((Unmarked(), 0))
            running[-1][0].say(SYSTEM, system)
        talk, turns = running.pop(rng.randrange(4))
        retrieved = [part for number in next(queries) for part in (documents[number], JOINT)]
        talk.say(USER, *retrieved, random_tokens(rng, 25), documents=range(0, len(retrieved), 2))
        yield talk.asked()
        talk.say(ASSISTANT, random_tokens(rng, rng.randrange(40, 200)))
        if turns < 7:
            running.append((talk, turns + 1))


def agent(documents: Sequence[list[int]], rng: random.Random) -> Iterator[Unmarked]:
    """Endless steps of agents, one agent after the other, twenty steps each. An agent reads files, some of them
    repeatedly. When its history is too long, only a summary and the latest results are kept."""
    system = random_tokens(rng, 400)
    # Files are longer than the documents that a RAG chain retrieves.
    files = [[token for part in rng.sample(documents, 3) for token in part] for _ in range(FILES)]
    while True:
        talk = _begun(system, rng)
        read: list[list[int]] = []
        for _ in range(20):
            yield talk.asked()
            read.append(rng.choice(files))
            _read(talk, read[-1], rng)
            if len(talk.ids) > COMPACT_AT:
                talk = _begun(system, rng)
                talk.say(ASSISTANT, random_tokens(rng, 250))
                for kept in read[-KEPT:]:
                    _read(talk, kept, rng)


def _begun(system: list[int], rng: random.Random) -> Unmarked:
    talk = Unmarked()
    talk.say(SYSTEM, system, random_tokens(rng, 10))  # the random tokens stand for the time of day
    talk.say(USER, random_tokens(rng, 80))
    return talk


def _read(talk: Unmarked, file: list[int], rng: random.Random) -> None:
    talk.say(ASSISTANT, random_tokens(rng, 40))
    talk.say(TOOL, random_tokens(rng, 5), file, documents=(1,))
