"""Finds the documents and the question among the texts of a conversation."""

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvmosaic.core.limits import MAX_DOCUMENTS
from kvmosaic.core.questions import SEAM, Seam

# "Source 1: ", "[2] ", "3. " or a tag with a number: it depends on the position of a document, not on its content.
_LABEL = re.compile(
    r"(?:[\[(*#]{0,4}[^\W\d_]{0,20}[ \t]?#?\d{1,4}[\])*:.]{1,4}(?=\s)|<[^<>\n\d]{1,80}\d[^<>\n]{0,80}>)"
)
_TEXT_PARTS = ("text", "input_text")
_DOCUMENT_PARTS = ("document", "search_result")
_TOOL_ROLES = ("tool", "function")
_SYSTEM_ROLES = ("system", "developer")
MAX_LOOKS = 64 * MAX_DOCUMENTS
"""Maximum number of values of the ``documents`` field that are looked at, including lists and objects."""
MAX_PARTS = 16 * MAX_DOCUMENTS
"""Maximum number of messages and parts of messages, including those of tool results, that are looked at."""
MAX_LOOKED_THROUGH = 2**20
"""Maximum number of characters in which the beginnings of questions are searched for. If there are more, all
beginnings count."""


@dataclass(frozen=True)
class Sources:
    """Documents and question of a request."""

    documents: tuple[str, ...] = ()
    """Distinct texts, without labels before them and whitespace around them."""
    question: str | None = None
    """The last question, if it is a text part of its message."""


def find_sources(
    body: Mapping[str, Any], wanted: Collection[str], min_length: int = 1, most: int = MAX_DOCUMENTS
) -> Sources:
    """The documents of a request's ``body``, of any API that vLLM serves. ``wanted``: the items of ``config.sources``
    to use. Returns at most ``most`` documents, none of fewer than ``min_length`` characters.

    The last text part of a user's message is a question and never a document, whatever follows it: a question may be
    left without an answer. The assistant's messages are answers. By these rules, the role of a text does not change
    as the conversation continues, so vLLM's prefix cache finds it again. The first part of a system prompt is not a
    document either: the prompt begins with it, so that cache serves it exactly.
    """
    names = (without_label(text) for source, text in _texts(body) if source in wanted)
    return Sources(tuple(islice(_each_once(names, min_length), most)), _question(body))


def has_too_many_parts(body: Mapping[str, Any]) -> bool:
    """Whether a request's ``body`` has more than :data:`MAX_PARTS` messages and parts. A client may send millions of
    empty ones, and :func:`find_sources` and :func:`find_seams` look at each of them."""
    left = MAX_PARTS
    lists = [body.get(name) for name in ("messages", "input", "system")]
    while lists:
        value = lists.pop()
        if isinstance(value, dict):  # a message, or a part of one
            lists += (value.get(name) for name in ("content", "output", "source"))
        elif isinstance(value, list):
            left -= len(value)
            if left < 0:
                return True
            lists += value
    return False


def find_seams(body: Mapping[str, Any], documents: Sequence[str]) -> list[Seam]:
    """The beginnings of the questions of a request's ``body``, except those that none of ``documents`` can
    extend across. There may be more of them than a request to the engine can have."""
    seams = dict.fromkeys(_seams(body))
    # Looking at a document has a cost of its own: clients may name millions of empty ones.
    if len(seams) * (sum(map(len, documents)) + SEAM * len(documents)) > MAX_LOOKED_THROUGH:
        return list(seams)
    return [seam for seam in seams if any(seam.may_be_in(document) for document in documents)]


def without_label(text: str) -> str:
    """A document as requests name it: without the label before it and white space around it."""
    text = text.lstrip()  # the pattern would try a label behind each blank, which takes a second for a few megabytes
    label = _LABEL.match(text)
    return text[label.end() if label else 0 :].strip()


def _each_once(names: Iterator[str], min_length: int) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if len(name) >= min_length and name not in seen:
            seen.add(name)
            yield name


def _texts(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Candidate documents, each with its source."""
    for text in _all_strings(body.get("documents")):
        yield "documents", text
    for part in _list(body.get("system"))[1:]:
        yield from _of_part(part)
    messages = _messages(body)
    for index, message in enumerate(messages):
        if message.get("type") == "function_call_output":
            yield from (("tools", text) for text in texts_of(message.get("output")))
        elif message.get("role") in _TOOL_ROLES:
            yield from (("tools", text) for text in texts_of(message.get("content")))
        else:
            for part in _context_parts(message, is_first=index == 0):
                yield from _of_part(part)


def _context_parts(message: dict[str, Any], *, is_first: bool) -> list[Any]:
    """The parts of a message that are neither system prompt nor question nor answer."""
    role, parts = message.get("role"), _list(message.get("content"))
    if role == "assistant":
        return []
    if role in _SYSTEM_ROLES:
        return parts[1:] if is_first else parts
    last = _last_text(parts)  # typed by an end user, even if the role is unknown
    return [part for place, part in enumerate(parts) if place != last]


def _seams(body: Mapping[str, Any]) -> Iterator[Seam]:
    """For each user's message, the beginning of its question behind the text before it. The documents of the request
    may be before the last question."""
    listed = deque(_all_strings(body.get("documents")), maxlen=1)
    messages = _messages(body)
    asked = [message for message in messages if message.get("role") == "user"][-1:]
    for text in islice(texts_of(asked[0].get("content")) if listed and asked else (), 1):
        yield Seam.between(listed[0], text)
    for message in messages:
        if message.get("role") in ("assistant", *_SYSTEM_ROLES, *_TOOL_ROLES):
            continue
        parts = _list(message.get("content"))
        last = _last_text(parts)
        before = next((text for part in reversed(parts[: max(0, last)]) for _, text in _of_part(part)), None)
        if before is not None:
            yield Seam.between(before, _text(parts[last]) or "")


def _of_part(part: Any) -> Iterator[tuple[str, str]]:
    """Documents in a part of a message. Parts of other kinds, like images, contain none."""
    text = _text(part)
    if text is not None:
        yield "parts", text
    elif isinstance(part, dict) and part.get("type") == "tool_result":
        yield from (("tools", text) for text in texts_of(part.get("content")))
    elif isinstance(part, dict) and part.get("type") in _DOCUMENT_PARTS:
        source = part.get("source")
        if isinstance(source, dict):
            part = source
        for content in (part.get("content"), part.get("data") if part.get("type") == "text" else None):
            yield from (("documents", text) for text in texts_of(content))


def _question(body: Mapping[str, Any]) -> str | None:
    """The last text part of the user's last message with text; ``None`` if that message is a single text."""
    for message in reversed(_messages(body)):
        content = message.get("content")
        if message.get("role") != "user" or not content:
            continue
        parts = _list(content)
        last = _last_text(parts)
        if last >= 0:
            return (_text(parts[last]) or "").strip() or None
        if isinstance(content, str):
            return None
    return None


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = _list(body.get("messages")) or _list(body.get("input"))
    return [message for message in messages if isinstance(message, dict)]


def _last_text(parts: list[Any]) -> int:
    """Index of the last part that is text, or -1."""
    return next((index for index in reversed(range(len(parts))) if _text(parts[index]) is not None), -1)


def texts_of(content: Any) -> Iterator[str]:
    """The texts of a message's content, which is one text or a list of parts."""
    if isinstance(content, str):
        yield content
    for part in _list(content):
        text = _text(part)
        if text is not None:
            yield text


def _text(part: Any) -> str | None:
    """The text of a part; ``None`` for other kinds of parts."""
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        part = part.get("text")
    return part if isinstance(part, str) else None


def _all_strings(value: Any) -> Iterator[str]:
    """All texts in a list of documents, which are texts or objects, whose keys depend on the template. Looks at no
    more than :data:`MAX_LOOKS` values, because a client may send millions of empty ones."""
    waiting = [value]
    for _ in range(MAX_LOOKS):
        if not waiting:
            return
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting.extend(reversed(value.values()))
        else:
            waiting.extend(reversed(_list(value)))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
