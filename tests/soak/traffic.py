"""Made-up clients: conversations with documents in any turn, and invalid requests."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from kvmosaic.core.token_bytes import Tokenizer

Kind = Literal["plain", "exact", "reuse", "blend", "junk"]
"""Kind of a request: without chunks; all chunk tokens recomputed; none recomputed; some recomputed; invalid
parameters."""

Marks = Literal["separator", "boundaries", "names"]
"""How requests say where their documents are: by a separator in the prompt, by positions, or by their texts."""

SEPARATOR = " # # "
ANSWER, TURN = "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n"
"""Tokens between a question and its answer, and between an answer and the next question."""
LONGEST = 860
"""Maximum number of tokens of a prompt."""
LONGEST_IN_CROWD = 260
LONG_ANSWER = 150
POLICIES = (
    "composite",
    "composite(asking=1)",
    "sink-link",
    "sink-link(k=2)",
    "random(seed=3)",
    "query-attention",
    "kv-deviation",
)
WORDS = """harbour ferry bakery lantern library cheese cave quarry goat market bridge council winter river
clock tower baker captain window street island morning letter garden copper engine teacher museum
barley violin forest station opens closes carries sells keeps paints repairs measures forgets remembers
the a every some no old new blue quiet"""


@dataclass(frozen=True)
class Ask:
    """One request."""

    kind: Kind
    tokens: list[int]
    params: Any
    """Its ``kv_transfer_params``, or anything that it sends instead."""
    salt: str | None
    outputs: int
    """Number of tokens of the answer."""
    abort_after: int | None
    """Number of steps after which its client leaves."""
    talk: "Conversation | None" = None


@dataclass
class Conversation:
    """A conversation so far, in tokens."""

    tokens: list[int]
    parts: list[tuple[int, int]]
    """System prompt and documents, and possibly text between them."""
    marks: Marks
    salt: str | None
    turns_left: int
    ratio: float
    policy: str


@dataclass
class Traffic:
    """Draws requests, which depend only on the seed and on the answers."""

    tokenizer: Tokenizer
    random: random.Random
    is_crowded: bool = False
    """Whether prompts are short and most answers long, so that vLLM runs out of blocks and preempts requests."""
    is_plain: bool = False
    """Whether all requests are for vLLM alone."""
    _documents: list[list[int]] = field(default_factory=list)
    _open: list[Conversation] = field(default_factory=list)
    """Conversations whose latest answer has arrived."""
    _recent: deque[Ask] = field(default_factory=lambda: deque(maxlen=12))
    """Requests with documents."""

    def __post_init__(self) -> None:
        self._documents = [self._new_document() for _ in range(24)]
        self._systems = [self._text(self.random.choice((4, 20, 60, 110))) for _ in range(6)]

    def next(self) -> Ask:
        """Another request."""
        ask = self._drawn()
        return replace(ask, kind="plain", params={"chunk_cache": False}) if self.is_plain else ask

    def _drawn(self) -> Ask:
        drawn = self.random.random()
        if drawn < 0.20:
            return self._plain()
        if drawn < 0.30:
            return self._junk()
        if self._recent and drawn < 0.46:
            return self._again(self.random.choice(self._recent))
        if self._open and drawn < 0.78:
            return self._turn(self._open.pop(self.random.randrange(len(self._open))))
        return self._turn(self._begin())

    def answered(self, ask: Ask, answer: list[int]) -> None:
        """Continue its conversation, or end it."""
        talk = ask.talk
        if talk is not None and talk.turns_left > 0 and len(self._open) < 12:
            talk.tokens = [*ask.tokens, *answer, *self.tokenizer.encode(TURN)]
            self._open.append(talk)

    def innocent(self, length: int, outputs: int) -> Ask:
        """A request without chunks."""
        tokens = self._text(length)
        return Ask(
            "plain", (tokens * (length // len(tokens) + 1))[:length], {"chunk_cache": False}, None, outputs, None
        )

    def _plain(self) -> Ask:
        long = not self.is_crowded and self.random.random() < 0.3  # exact prefix blocks begin at 256 tokens
        ask = self.innocent(self.random.randint(300, 700) if long else self.random.randint(5, 120), self._outputs())
        params = self.random.choice((None, {"chunk_cache": False}, {}))
        tokens = [*self.random.choice(self._systems), *ask.tokens]
        return Ask("plain", tokens, params, self._salt(), ask.outputs, self._abort())

    def _begin(self) -> Conversation:
        system = list(self.random.choice(self._systems))
        if self.random.random() < 0.4:
            system = [*self._text(6), *system]
        ratio = self.random.choices((0.0, 1.0, self.random.uniform(0.05, 0.9)), (5, 3, 3))[0]
        return Conversation(
            tokens=system,
            parts=[(0, len(system))],
            marks=self.random.choice(get_args(Marks)),
            salt=self._salt(),
            turns_left=self.random.randint(1, 5),
            ratio=ratio,
            policy=self.random.choice(POLICIES),
        )

    def _turn(self, talk: Conversation) -> Ask:
        talk.turns_left -= 1
        tokens, parts = list(talk.tokens), list(talk.parts)
        for _ in range(self.random.choice((0, 1, 1, 2, 3, 5)) if len(parts) > 1 else self.random.randint(1, 5)):
            document = self._document()
            if len(tokens) + len(document) > self._longest - 60:
                break
            if parts[-1][1] < len(tokens) and self.random.random() < 0.3:
                parts.append((parts[-1][1], len(tokens)))
            parts.append((len(tokens), len(tokens) + len(document)))
            tokens += document
        question = self._words(self.random.randint(2, 12))
        tokens += self.tokenizer.encode(SEPARATOR + question + ANSWER)
        if len(tokens) > self._longest:
            return self._plain()
        talk.parts = parts
        params: dict[str, Any] = {"recompute_ratio": talk.ratio, "policy": talk.policy}
        if self.random.random() < 0.3:
            params["report"] = True
        if talk.marks == "boundaries":
            params["boundaries"] = [*parts, (parts[-1][1], len(tokens))]
        elif talk.marks == "names":
            params["documents"] = [self.tokenizer.decode(tokens[start:end]) for start, end in parts[1:]]
            params |= {"question": question} if self.random.random() < 0.5 else {}
        ask = Ask(_kind(talk.ratio), tokens, params, talk.salt, self._outputs(), self._abort(), talk)
        self._recent.append(ask)
        return ask

    def _again(self, before: Ask) -> Ask:
        """The same prompt with other parameters. State that one request left must not reach the other."""
        salt = before.salt if self.random.random() < 0.8 else self._salt()
        if self.random.random() < 0.3:
            return Ask("plain", before.tokens, {"chunk_cache": False}, salt, self._outputs(), self._abort())
        ratio = self.random.choice((0.0, 1.0, self.random.uniform(0.05, 0.9)))
        params = {**before.params, "recompute_ratio": ratio, "policy": self.random.choice(POLICIES)}
        return Ask(_kind(ratio), before.tokens, params, salt, self._outputs(), self._abort())

    def _junk(self) -> Ask:
        """Invalid parameters. Such a request is answered as if it had none."""
        tokens = list(self.random.choice(self._systems))
        for _ in range(3):
            tokens += self._document()
        tokens += self.tokenizer.encode(SEPARATOR + self._words(5))
        return Ask("junk", tokens, self.random.choice(list(self._nonsense(len(tokens)))), None, self._outputs(), None)

    def _nonsense(self, length: int) -> Iterator[Any]:
        yield from ({"recompute_ratio": bad} for bad in (7, -1, "x", True, float("nan"), [], {}, 10**400))
        yield from (
            {"policy": bad} for bad in ("nonsense", "sink-link(k=-1)", 5, "", "((((", "kv-deviation(layers=99)")
        )
        yield {"policy": "composite(" + " " * 32_000}
        yield {"policy": "composite(" + "a=1, " * 5_000 + ")"}
        yield {"boundaries": [[0, 3]]}
        yield {"boundaries": [[0, length], [0, length]]}
        yield {"boundaries": [[5, 2], [2, length]]}
        yield {"boundaries": [["a", "b"]]}
        yield {"boundaries": "0-3"}
        yield {"boundaries": [[0, 0]] * 100_000 + [[0, length]], "recompute_ratio": 9}
        yield {"chunk_cache": "no"}
        yield {"report": "please", "recompute_ratio": 2}
        yield [["recompute_ratio", 1]]
        yield "recompute_ratio=1"
        yield 17
        yield [1] * 10

    @property
    def _longest(self) -> int:
        return LONGEST_IN_CROWD if self.is_crowded else LONGEST

    def _document(self) -> list[int]:
        if self.random.random() < 0.15:
            return self._new_document()
        return self._documents[int(len(self._documents) * self.random.random() ** 2)]

    def _new_document(self) -> list[int]:
        return self.tokenizer.encode(SEPARATOR + self._words(self.random.randint(8, 70)))

    def _text(self, words: int) -> list[int]:
        return self.tokenizer.encode(self._words(words))

    def _words(self, count: int) -> str:
        return " ".join(self.random.choices(WORDS.split(), k=count))

    def _outputs(self) -> int:
        return LONG_ANSWER if self.is_crowded and self.random.random() < 0.8 else self.random.choice((1, 4, 12, 40))

    def _salt(self) -> str | None:
        return self.random.choice((None, None, None, "alice", "bob"))

    def _abort(self) -> int | None:
        return self.random.randrange(30) if self.random.random() < 0.12 else None


def _kind(ratio: float) -> Kind:
    return "reuse" if ratio == 0 else "exact" if ratio == 1 else "blend"
