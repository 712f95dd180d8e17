"""Documents from files: a text file is one document; a JSONL file has one per line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvmosaic.core.errors import PromptError


class Document(NamedTuple):
    text: str
    origin: str
    """File, and line if there are several, for messages."""


def read_corpus(paths: Sequence[Path], separator: str | None) -> Iterator[Document]:
    """The documents of files and folders, in order. Raises :class:`PromptError`, with a one-line message, at the
    first document that cannot be one chunk. Documents are read lazily, because a corpus may be larger than memory."""
    for path in paths:
        for file in _files(path):
            for document in _lines(file) if file.suffix == ".jsonl" else [Document(_read(file), str(file))]:
                if not document.text.strip():
                    raise PromptError(f"{document.origin}: the document is empty")
                if separator is not None and separator in document.text:
                    raise PromptError(
                        f"{document.origin}: the document has the separator {separator!r} in it, so requests would "
                        "split it into several chunks; split the document, or choose another separator"
                    )
                yield document


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            yield file


def _lines(file: Path) -> Iterator[Document]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield Document(_text_of(line, f"{file}, line {number}"), f"{file}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {file}: {error}") from None


def _text_of(line: str, origin: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{origin}: not JSON ({error})") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise PromptError(f'{origin}: should be an object like {{"text": "…"}}')
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can contain an unpaired surrogate, which no tokenizer accepts
        raise PromptError(f"{origin}: the text has an unpaired surrogate") from None
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {file}: {error}") from None
