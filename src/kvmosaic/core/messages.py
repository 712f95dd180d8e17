"""Documents in chat messages: texts that were sent as parts of their own, and results of tools."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvmosaic.core.errors import PromptError

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are texts."""


def documents_in(messages: object, sources: Collection[str]) -> tuple[list[str], str | None]:
    """The texts of a conversation that are documents, and its question.

    ``sources`` may have ``parts``: every text of a message's content list; and ``tools``: every result of a tool. The
    last text of the last user message is the question, and never a document. Clients send anything: what has
    another shape is passed over.
    """
    known = [each for each in _items(messages) if isinstance(each, Mapping)]
    asked = max((index for index, message in enumerate(known) if message.get("role") == "user"), default=None)
    documents: list[str] = []
    question = None
    for index, message in enumerate(known):
        content = message.get("content")
        texts = texts_of(content)
        if index == asked and texts:
            question = texts.pop()
        if message.get("role") == "tool":
            documents += texts if "tools" in sources else []
        elif not isinstance(content, str) and "parts" in sources:
            documents += texts
    return documents, question


def texts_of(content: object) -> list[str]:
    """The texts of a message's content, which is one text or a list of parts."""
    parts = [content] if isinstance(content, str) else _items(content)
    return [text for text in map(_text, parts) if text is not None]


def conversations(messages: Sequence[Any]) -> list[Sequence[Any]]:
    """One conversation or several, as several."""
    return [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)


def names_for_each(documents: Sequence[str] | Sequence[Sequence[str]] | None, prompts: int) -> list[list[str]]:
    """The documents of each prompt: a list of texts is for all of them, a list of lists has one for each."""
    given: Any = [] if documents is None else documents
    lists = [given] * prompts if _are_texts(given) else given
    if not isinstance(lists, (list, tuple)) or len(lists) != prompts or not all(map(_are_texts, lists)):
        raise PromptError(
            f"documents must be a list of texts, or a list of them for each prompt (there are {prompts})"
        )
    return [list(names) for names in lists]


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def _text(part: object) -> str | None:
    if isinstance(part, Mapping):
        part = part.get("text") if part.get("type", "text") in TEXT_PARTS else None
    return part if isinstance(part, str) else None


def _items(value: object) -> list[Any]:
    """What a list holds; of all else, nothing."""
    return list(value) if isinstance(value, (list, tuple)) else []
