"""Finds named documents in a prompt's tokens, independent of the text that a chat template puts around them."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvmosaic.core.prompt import Span
from kvmosaic.core.token_bytes import PromptText

ANCHOR = 8
"""Size of the window that locates candidate positions of a document, in bytes: one 64-bit number."""
TRIED = 9
"""Number of windows tried per document. The window that is rarest in the prompt becomes its anchor."""
TOKEN_BYTES = 8
"""Maximum number of bytes that a token of the prompt counts as. A token may stand for more than a hundred equal
characters, and the engine limits the length of prompts in tokens."""
MAX_NAMED = 16
"""Maximum total size of the documents, per byte of the prompt; documents beyond it count as absent."""
MAX_WORK = 8
"""Comparison budget, per byte of the prompt and of the documents."""
COMPARISON = 64
"""Number of bytes that are compared first, and the cost of that comparison."""
MAX_EDGES = 16
"""Maximum number of word ends that are tried at either end of a document."""
MAX_EDGE = 1024
"""Maximum distance of these word ends from either end of a document, in characters."""

_ESCAPED = re.compile(r'["\\\x00-\x1f]')
_WORD_END = re.compile(r"[^\W_](?=[\W_])")
_BITS = 16
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Found:
    """Positions of named documents in a prompt."""

    spans: tuple[Span, ...]
    """Cores of the documents, ascending and not overlapping."""
    absent: tuple[int, ...]
    """Indices of the documents that do not occur in the prompt."""


class _Name:
    """A document in one of the forms that a prompt may contain."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.bytes = text.encode(errors="surrogatepass")
        self.head = self.bytes[:COMPARISON]
        self.anchor_at = 0
        self.work = 0
        """Remaining comparison budget."""

    def first_edges(self) -> Iterator[int]:
        """Byte offsets of word ends inside the text, ascending: after a letter or digit, before anything else."""
        for match in _WORD_END.finditer(self.text, 0, MAX_EDGE):
            yield len(self.text[: match.end()].encode(errors="surrogatepass"))

    def last_edges(self) -> Iterator[int]:
        """Byte offsets of word ends inside the text, from the last one backwards."""
        text = self.text
        is_in_word = text[-1].isalnum()
        for at in range(len(text) - 1, max(0, len(text) - MAX_EDGE), -1):
            was_in_word, is_in_word = is_in_word, text[at - 1].isalnum()
            if is_in_word and not was_in_word:
                yield len(self.bytes) - len(text[at:].encode(errors="surrogatepass"))


def find_documents(
    prompt: PromptText, documents: Sequence[str], normalize: Callable[[str], str] = lambda text: text
) -> Found:
    """Every occurrence of ``documents`` in ``prompt``: unchanged, as ``normalize`` returns them, or as JSON escapes
    them. ``normalize`` does what the tokenizer does to a text before it splits the text. Whitespace around documents
    is ignored, because templates trim it.

    A span is a document's *core*: from the end of its first word to the end of the last word that is followed by
    another character of the document. Tokenizers split there whatever text comes before or after, so the core has the
    same tokens in every prompt. The text outside the core is ordinary text. If documents overlap, the first one wins;
    if they begin at the same place, the longest one wins.

    Time is linear in the size of the prompt and the documents. If the prompt resembles a document almost everywhere,
    the search for that document stops early and the document counts as absent.
    """
    indices: dict[str, list[int]] = {}
    beyond: list[int] = []
    size = min(len(prompt.bytes), TOKEN_BYTES * len(prompt.starts))
    room = MAX_NAMED * size
    for index, document in enumerate(documents):
        is_long = len(document) > room  # then it is not encoded
        room -= len(document) if is_long or document.isascii() else len(document.encode(errors="surrogatepass"))
        if room < 0:
            beyond.append(index)
        else:
            indices.setdefault(document.strip(), []).append(index)
    places: list[tuple[int, _Name]] = []
    # A normalised prompt has all texts normalised. JSON and plain text may be in one prompt: a quotation of a tool's
    # result must not hide the result itself.
    for write in (spellings, lambda text: {normalize(text)} - {text}):
        texts = [text for text in indices if len(text) <= len(prompt.bytes)]
        names = [(text, _Name(new)) for text in texts for new in write(text)]
        fitting = [name for _, name in names if ANCHOR <= len(name.bytes) <= len(prompt.bytes)]
        found = _find_all(prompt.bytes, fitting, size)
        there = {id(name) for _, name in found}
        for text in {text for text, name in names if id(name) in there}:
            del indices[text]
        places += found
    places.sort(key=lambda place: (place[0], -len(place[1].bytes)))
    spans: list[Span] = []
    end = 0
    for at, name in places:
        if at >= end:
            end = at + len(name.bytes)
            span = _core(prompt, at, name)
            if span is not None:
                spans.append(span)
    return Found(tuple(spans), tuple(sorted([*beyond, *(index for each in indices.values() for index in each)])))


def spellings(text: str) -> tuple[str, ...]:
    """The ways in which :func:`find_documents` finds a document, except those of a tokenizer: the text itself first,
    then as JSON escapes it."""
    return tuple(dict.fromkeys((text, _json(text), _ascii_json(text))))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1] if _ESCAPED.search(text) else text


def _ascii_json(text: str) -> str:
    return text if text.isascii() else json.dumps(text)[1:-1]


def _find_all(text: bytes, names: Sequence[_Name], size: int) -> list[tuple[int, _Name]]:
    """Occurrences of ``names`` in ``text``, with their byte offsets. ``size``: number of bytes that ``text`` counts
    as."""
    if not names:
        return []
    windows = _windows(text)
    slots = _slots(windows)
    by_anchor = _by_anchor(names, np.bincount(slots, minlength=1 << _BITS))
    is_wanted = np.zeros(1 << _BITS, dtype=bool)
    is_wanted[_slots(np.fromiter(by_anchor, np.uint64, len(by_anchor)))] = True
    candidates = np.flatnonzero(is_wanted.take(slots))[:size]
    for name in names:
        name.work = MAX_WORK * (size // len(names) + len(name.bytes))
    places = []
    for place, anchor in zip(candidates.tolist(), windows[candidates].tolist(), strict=True):
        is_over = False
        for name in by_anchor.get(anchor, ()):
            at = place - name.anchor_at
            name.work -= COMPARISON
            if at >= 0 and text.startswith(name.head, at):
                name.work -= len(name.bytes)
                if text.startswith(name.bytes, at):
                    places.append((at, name))
            is_over |= name.work < 0
        if is_over:
            by_anchor[anchor] = [name for name in by_anchor[anchor] if name.work >= 0]
    return places


def _by_anchor(names: Sequence[_Name], counts: np.ndarray) -> dict[int, list[_Name]]:
    """Names by their anchors. ``counts``: number of windows of the prompt in each slot. A name is left out if one of
    its windows does not occur in the prompt."""
    sizes = np.fromiter((len(name.bytes) for name in names), np.int64, len(names))
    # Candidate windows, evenly spread from the beginning of each document to its end.
    offsets = (sizes - ANCHOR)[:, None] * np.arange(TRIED) // (TRIED - 1)
    starts = (sizes.cumsum() - sizes)[:, None]
    tried = _windows(b"".join([name.bytes for name in names]))[starts + offsets]
    found = counts[_slots(tried)]
    rows, best = np.arange(len(names)), found.argmin(axis=1)
    chosen = (part[rows, best].tolist() for part in (tried, offsets, found))
    by_anchor: dict[int, list[_Name]] = {}
    for name, anchor, offset, count in zip(names, *chosen, strict=True):
        if count:
            name.anchor_at = offset
            by_anchor.setdefault(anchor, []).append(name)
    return by_anchor


def _windows(text: bytes) -> np.ndarray:
    """The window that begins at each byte of a text, as a number."""
    return np.ndarray((len(text) - ANCHOR + 1,), "<u8", text, strides=(1,))


def _slots(windows: np.ndarray) -> np.ndarray:
    return ((windows * _SPREAD) >> np.uint64(64 - _BITS)).view(np.int64)


def _core(prompt: PromptText, at: int, name: _Name) -> Span | None:
    """The tokens of a document between two word ends that are also token boundaries of the prompt."""
    start = _first_token(prompt, at, name.first_edges())
    end = _first_token(prompt, at, name.last_edges())
    return None if start is None or end is None or end <= start else Span(start, end)


def _first_token(prompt: PromptText, at: int, edges: Iterator[int]) -> int | None:
    """The token that begins at the first of ``edges`` (offsets from ``at``) that is a token boundary."""
    for edge in islice(edges, MAX_EDGES):
        token = prompt.token_at(at + edge)
        if token is not None:
            return token
    return None
