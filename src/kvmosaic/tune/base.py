"""Prompts that a sink is learned from."""

from dataclasses import dataclass

from kvmosaic.core.prompt import Span


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt with chunks, questions about them and answers."""

    tokens: tuple[int, ...]
    chunks: tuple[Span, ...]
    compared: Span
    """Tokens after which the next-token predictions of student and teacher are compared."""
    kind: str
    """Name of its task."""


@dataclass(frozen=True)
class Lesson:
    """A prompt as text. ``question`` follows the documents, and then ``answer``, which is given to the model."""

    system: str
    documents: tuple[str, ...]
    question: str
    answer: str
    kind: str
