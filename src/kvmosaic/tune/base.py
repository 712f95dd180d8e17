"""What is learned from."""

from dataclasses import dataclass

from kvmosaic.core.prompt import Span


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt with chunks, questions about them and answers."""

    tokens: tuple[int, ...]
    chunks: tuple[Span, ...]
    compared: Span
    """Tokens after which student and teacher are compared: what each says comes next."""
    kind: str
    """Which task it is of."""


@dataclass(frozen=True)
class Lesson:
    """A prompt as text. What follows the documents is ``question`` and, given to the model, ``answer``."""

    system: str
    documents: tuple[str, ...]
    question: str
    answer: str
    kind: str
