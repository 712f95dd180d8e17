"""Prompts that a sink is learned from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmosaic.core.prompt import Span


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt with chunks and a question about them, and the model's answer once there is one."""

    tokens: tuple[int, ...]
    chunks: tuple[Span, ...]
    compared: Span
    """Tokens after which the next-token predictions of student and teacher are compared."""
    kind: str
    """Name of its task."""
    answer: int = 0
    """Number of tokens of the model's answer, at the end of the prompt."""

    def answered(self, answer: Sequence[int]) -> "TrainingPrompt":
        """The prompt with an answer, every token of which is compared."""
        tokens = (*self.tokens, *answer)
        return replace(self, tokens=tokens, compared=Span(self.compared.start, len(tokens) - 1), answer=len(answer))


@dataclass(frozen=True)
class Question:
    """A question about documents. ``lead`` is the beginning of the answer, which is given to the model."""

    text: str
    lead: str
    answer: str
    """The rest of the right answer, for prompts that show it as an example."""


@dataclass(frozen=True)
class Lesson:
    """A prompt as text: ``question`` follows the documents, and then ``lead``, with which the answer begins."""

    system: str
    documents: tuple[str, ...]
    question: str
    lead: str
    kind: str
