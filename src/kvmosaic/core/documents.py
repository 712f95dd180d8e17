"""Finds named documents in a prompt's tokens, independent of the text that a chat template puts around them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from json.encoder import encode_basestring, encode_basestring_ascii

import numpy as np

from kvmosaic.core.occurrences import Needle, occurrences
from kvmosaic.core.prompt import Span
from kvmosaic.core.questions import Questions, seam_needles
from kvmosaic.core.token_bytes import PromptText

TOKEN_BYTES = 8
"""Maximum number of bytes that a token of the prompt counts as. A token may stand for more than a hundred equal
characters, and the engine limits the length of prompts in tokens."""
MAX_NAMED = 16
"""Maximum total size of the documents, per byte of the prompt; documents beyond it count as absent."""
MAX_EDGES = 16
"""Maximum number of word ends that are tried at either end of a document."""
MAX_EDGE = 1024
"""Maximum distance of these word ends from either end of a document, in characters."""
MAX_KNOWN_TEXTS = 2048
"""Number of documents whose word ends are remembered: most documents come back."""
MAX_KNOWN = 4096
"""Maximum length of such a document, in characters. Longer ones take little time for their size."""

_WORD_END = re.compile(r"[^\W_](?=[\W_])")


@dataclass(frozen=True)
class Found:
    """Positions of named documents in a prompt."""

    spans: tuple[Span, ...]
    """Cores of the documents, ascending and not overlapping."""
    absent: tuple[int, ...]
    """Indices of the documents that do not occur in the prompt."""


class _Name(Needle):
    """A document in one of the forms that a prompt may contain."""

    __slots__ = ("indices", "is_found", "plain", "text")

    def __init__(self, text: str, plain: "_Name | None" = None) -> None:
        """``plain``: the document as it is named, if ``text`` is another form of it."""
        super().__init__(text)
        self.text = text
        self.plain = plain or self
        self.indices: list[int] = []
        """Where the request names this text. Only plain forms have indices."""
        self.is_found = False
        """Whether any form was found. Only plain forms know."""

    def edges(self) -> tuple[int, int]:
        """Byte offsets of the first and the last word end inside the text; 0 if there is none."""
        edges = _known_edges if len(self.text) <= MAX_KNOWN else _edges
        return edges(self.text, len(self.bytes))

    def first_edges(self) -> Iterator[int]:
        """Byte offsets of word ends inside the text, ascending: after a letter or digit, before anything else."""
        for match in _WORD_END.finditer(self.text, 0, MAX_EDGE):
            yield _offset(self.text, match.end(), len(self.bytes))

    def last_edges(self) -> Iterator[int]:
        """Byte offsets of word ends inside the text, from the last one backwards."""
        return _last_edges(self.text, len(self.bytes))


def _edges(text: str, size: int) -> tuple[int, int]:
    match = _WORD_END.search(text, 0, MAX_EDGE)
    return 0 if match is None else _offset(text, match.end(), size), next(_last_edges(text, size), 0)


_known_edges = lru_cache(MAX_KNOWN_TEXTS)(_edges)


def _last_edges(text: str, size: int) -> Iterator[int]:
    is_in_word = text[-1].isalnum()
    for at in range(len(text) - 1, max(0, len(text) - MAX_EDGE), -1):
        was_in_word, is_in_word = is_in_word, text[at - 1].isalnum()
        if is_in_word and not was_in_word:
            yield _offset(text, at, size)


def _offset(text: str, at: int, size: int) -> int:
    """Byte offset of character ``at`` of a text of ``size`` bytes, quickly if it is near the beginning or the end."""
    if size == len(text):
        return at
    if 2 * at <= len(text):
        return len(text[:at].encode(errors="surrogatepass"))
    return size - len(text[at:].encode(errors="surrogatepass"))


def find_documents(
    prompt: PromptText,
    documents: Sequence[str],
    normalize: Callable[[str], str] = lambda text: text,
    seams: Sequence[tuple[str, str]] = (),
) -> Found:
    """Every occurrence of ``documents`` in ``prompt``: unchanged, as ``normalize`` returns them, or as JSON escapes
    them. ``normalize`` does what the tokenizer does to a text before it splits the text. Whitespace around documents
    is ignored, because templates trim it.

    A span is a document's *core*: from the end of its first word to the end of the last word that is followed by
    another character of the document. Tokenizers split there whatever text comes before or after, so the core has the
    same tokens in every prompt. The text outside the core is ordinary text. If documents overlap, the first one wins;
    if they begin at the same place, the longest one wins. No document is found across one of ``seams``: ends of
    texts, each with the beginning of the question behind it.

    Time is linear in the size of the prompt and the documents. If the prompt resembles a document almost everywhere,
    the search for that document stops early and the document counts as absent. If it resembles one of ``seams`` so,
    all documents count as absent, because any of them might be found over a question.
    """
    beyond: list[int] = []
    names: dict[str, _Name] = {}
    size = min(len(prompt.bytes), TOKEN_BYTES * len(prompt.starts))
    room = MAX_NAMED * size
    for index, document in enumerate(documents):
        room -= len(document)
        if room < 0:  # a text that is too long is not encoded
            beyond.append(index)
            continue
        text = document.strip()
        name = names.get(text) or names.setdefault(text, _Name(text))
        room -= len(name.bytes) - len(text)
        if room < 0:
            beyond.append(index)
        else:
            name.indices.append(index)
    asked = seam_needles(seams, normalize)
    questions = Questions(prompt.bytes, occurrences(prompt.bytes, asked, size))
    if not all(needle.is_known for needle in asked):
        return Found((), tuple(range(len(documents))))

    def search(wanted: list[_Name]) -> list[tuple[int, _Name]]:
        """Where texts are in which no question begins."""
        places = occurrences(prompt.bytes, wanted, size)
        if asked:
            places = [place for place in places if questions.are_apart_from(place[0], place[0] + len(place[1].bytes))]
        for _, name in places:
            name.plain.is_found = True
        return places

    plain = [name for name in names.values() if name.indices]
    escaped: list[_Name] = []
    if b"\\" in prompt.bytes:  # JSON needs it for all that it changes
        short = [name for name in plain if len(name.text) <= len(prompt.bytes)]
        escaped = [_Name(new, name) for name in short for new in spellings(name.text)[1:]]
    places = search(plain + escaped)
    # A normalised prompt has all texts normalised. JSON and plain text may be in one prompt: a quotation of a tool's
    # result must not hide the result itself.
    missing = [name for name in plain if not name.is_found and len(name.text) <= len(prompt.bytes)]
    if missing:
        forms = [(name, normalize(name.text)) for name in missing]
        places += search([_Name(new, name) for name, new in forms if new != name.text])
    places.sort(key=lambda place: (place[0], -len(place[1].bytes)))
    apart: list[tuple[int, _Name]] = []
    end = 0
    for at, name in places:
        if at >= end:
            end = at + len(name.bytes)
            apart.append((at, name))
    absent = [index for name in plain if not name.is_found for index in name.indices]
    return Found(tuple(_cores(prompt, apart)), tuple(sorted(beyond + absent)))


def spellings(text: str) -> tuple[str, ...]:
    """The ways in which :func:`find_documents` finds a document, except those of a tokenizer: the text itself first,
    then as JSON escapes it."""
    json = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    if not json.isprintable():  # most texts are, and JSON's own function is slow
        json = encode_basestring(text)[1:-1]
    ascii_json = json if text.isascii() else encode_basestring_ascii(text)[1:-1]
    return tuple(dict.fromkeys((text, json, ascii_json)))


def _cores(prompt: PromptText, places: Sequence[tuple[int, _Name]]) -> list[Span]:
    """The tokens of documents between two word ends that are also token boundaries of the prompt."""
    edges = [name.edges() for _, name in places]
    firsts = _tokens_at(prompt, [at + first for (at, _), (first, _) in zip(places, edges, strict=True)])
    lasts = _tokens_at(prompt, [at + last for (at, _), (_, last) in zip(places, edges, strict=True)])
    spans = []
    for (at, name), first, last in zip(places, firsts, lasts, strict=True):
        start = _first_token(prompt, at, name.first_edges()) if first < 0 else first
        end = _first_token(prompt, at, name.last_edges()) if last < 0 else last
        if 0 <= start < end:
            spans.append(Span(start, end))
    return spans


def _first_token(prompt: PromptText, at: int, edges: Iterator[int]) -> int:
    """The token that begins at the first of ``edges`` (offsets from ``at``) that is a token boundary; -1 if none
    is."""
    tokens = _tokens_at(prompt, [at + edge for edge in islice(edges, MAX_EDGES)])
    return next((token for token in tokens if token >= 0), -1)


def _tokens_at(prompt: PromptText, offsets: list[int]) -> list[int]:
    """The tokens that begin at ``offsets``; -1 where none does."""
    wanted = np.array(offsets, np.int64)
    found = prompt.starts.searchsorted(wanted)
    tokens: list[int] = np.where(prompt.starts.take(found, mode="clip") == wanted, found, -1).tolist()
    return tokens
