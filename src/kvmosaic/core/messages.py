"""Calls with several prompts, and the documents of each prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvmosaic.core.errors import PromptError


def conversations(messages: Sequence[Any]) -> list[Sequence[Any]]:
    """A list of conversations, from one conversation or several."""
    return [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)


def names_for_each(documents: Sequence[str] | Sequence[Sequence[str]] | None, prompts: int) -> list[list[str]]:
    """The documents of each prompt. A list of texts applies to all prompts, a list of lists has one list for each."""
    given: Any = [] if documents is None else documents
    lists = [given] * prompts if _are_texts(given) else given
    if not isinstance(lists, (list, tuple)) or len(lists) != prompts or not all(map(_are_texts, lists)):
        raise PromptError(
            f"documents must be a list of texts, or a list with one such list per prompt (prompts: {prompts})"
        )
    return [list(names) for names in lists]


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
