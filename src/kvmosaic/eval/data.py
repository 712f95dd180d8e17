"""Examples from files: our own JSONL, SQuAD-style JSON, NQ with oracle contexts, key-value retrieval."""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvmosaic.core.errors import ConfigError
from kvmosaic.eval.base import Example
from kvmosaic.eval.synthetic import synthetic

SYSTEM = "Read the documents and answer the question with a few words."
LEAD = "Answer:"
KV_SYSTEM = "Find the value of the key in the JSON data."
KV_QUESTION = "Repeat the record of one key."
PASSAGES = 6
"""Number of passages per question of SQuAD and NQ, including the one with the answer."""
KV_CHUNKS, KV_RECORDS = 5, 25
"""Number of chunks of a key-value example, and maximum number of records, which are spread evenly over the chunks.
That is about 1,800 tokens, in which a model of a few hundred million parameters finds the right record at least now
and then."""

SYNTHETIC = {"synthetic": None, "synthetic-1": 1, "synthetic-2": 2, "synthetic-3": 3}
"""Built-in data: name → number of documents that a question needs; ``None``: one, two and three in turn."""


def load(
    source: str,
    limit: int,
    seed: int,
    form: str | None = None,
    keep: Callable[[str], bool] = lambda text: True,
) -> list[Example]:
    """``limit`` examples, or all if there are fewer, of a file or of the built-in generator; ``seed`` chooses
    them. The format is recognised from the content unless ``form`` names one of ``FORMATS``. ``keep`` is asked about
    the text with the answer of each record of a file; rejected records are neither questions nor distractors."""
    if limit < 1:
        raise ConfigError(f"--limit {limit}: must be at least 1")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: must not be negative")
    if form is not None and form not in FORMATS:
        raise ConfigError(f"--format {form}: choose one of {', '.join(FORMATS)}")
    if source in SYNTHETIC:
        if form is not None:
            raise ConfigError(f"--format {form}: {source} is generated, not read from a file; leave --format out")
        return synthetic(limit, seed, SYNTHETIC[source])  # type: ignore[arg-type]  # 1, 2 or 3
    records = _records(Path(source))
    found = form or _recognise(source, records[0][1])
    if found == "squad":
        records = list(_squad_questions(source, records))
    records = [(line, record) for line, record in records if keep(_answering(found, record))]
    rng = random.Random(seed)
    # All records are shuffled first, so that a larger limit only adds examples to those of a smaller one.
    order = rng.sample(range(len(records)), len(records))[:limit]
    make = FORMATS[found]
    examples = []
    for index in order:
        line, record = records[index]
        others = [other for position, (_, other) in enumerate(records) if position != index]
        try:
            examples.append(make(record, others, random.Random(f"{seed}/{index}")))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ConfigError(f"{source}, line {line}: not a {found} example ({_reason(error)})") from None
    return examples


def _answering(form: str, record: Any) -> str:
    """The text of a record that has its answer; of key-value records, the whole record."""
    try:
        if form == "squad":
            return _text(record["context"], "context")
        if form == "jsonl":
            example = FORMATS[form](record, [], random.Random(0))
            held = (text for text in example.chunks if any(answer in text for answer in example.answers))
            return next(held, example.chunks[0])
        return _passage(record) if form == "nq" else json.dumps(record, sort_keys=True)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        return ""  # the error is reported later


def is_examples(path: Path) -> bool:
    """Whether a file seems to hold examples, not documents."""
    if path.suffix not in (".json", ".jsonl", ".gz"):
        return False
    try:
        _recognise(str(path), _records(path)[0][1])
    except ConfigError:
        return False
    return True


def _records(path: Path) -> list[tuple[int, Any]]:
    """Line number and content of each JSON value: one for the whole file, or one per line."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot read data {path}: {why}; give a file of examples, or synthetic") from None
    try:
        return [(1, json.loads(text))]
    except ValueError:
        pass
    except RecursionError:
        raise ConfigError(f"{path}: its JSON is nested too deeply; give a file of examples") from None
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append((number, json.loads(line)))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error})") from None
    if not records:
        raise ConfigError(f"{path}: no examples in it")
    return records


def _recognise(source: str, record: Any) -> str:
    keys = set(record) if isinstance(record, dict) else set()
    for form, needed in (
        ("jsonl", {"chunks", "question", "answers"}),
        ("squad", {"data"}),
        ("nq", {"question", "answers", "ctxs"}),
        ("kv", {"ordered_kv_records", "key", "value"}),
    ):
        if needed <= keys:
            return form
    raise ConfigError(
        f"{source}, line 1: format not recognised; it has {', '.join(sorted(keys)) or 'no keys'}, and should have "
        "chunks, question and answers, or use --format"
    )


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can contain an unpaired surrogate, which no tokenizer accepts
        raise ValueError(f"{what} has an unpaired surrogate") from None
    return value


def _words(value: Any, what: str) -> str:
    if not _text(value, what).strip():
        raise ValueError(f"{what} must not be empty")
    return value


def _texts(values: Any, what: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{what} must be a list that is not empty")
    return tuple(_text(value, what) for value in values)


def _right(values: Any) -> tuple[str, ...]:
    return tuple(_words(value, "answers") for value in _texts(values, "answers"))


def _own(record: Any, others: Sequence[Any], rng: random.Random) -> Example:
    system, lead = (_text(record.get(name, ""), name) for name in ("system", "lead"))
    question = _words(record["question"], "question")
    return Example(system, _texts(record["chunks"], "chunks"), question, _right(record["answers"]), lead)


def _squad_questions(source: str, records: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """The answerable questions of SQuAD's nested articles, each with its paragraph's text."""
    count = 0
    for line, record in records:
        try:
            for article in record["data"]:
                for paragraph in article["paragraphs"]:
                    for asked in paragraph["qas"]:
                        if asked["answers"]:
                            count += 1
                            yield line, {**asked, "context": paragraph["context"]}
        except (KeyError, TypeError) as error:  # noqa: PERF203  # one turn is a whole file
            raise ConfigError(f"{source}, question {count + 1}: not SQuAD ({_reason(error)})") from None
    if not count:
        raise ConfigError(f"{source}: no question with an answer in it")


def _squad(record: Any, others: Sequence[Any], rng: random.Random) -> Example:
    gold = _text(record["context"], "context")
    answers = _right([answer["text"] for answer in record["answers"]])
    chunks = _among(gold, (other["context"] for other in _shuffled(others, rng)), rng)
    question = f"Question: {_words(record['question'], 'question')}"
    return Example(SYSTEM, chunks, question, tuple(dict.fromkeys(answers)), LEAD)


def _nq(record: Any, others: Sequence[Any], rng: random.Random) -> Example:
    chunks = _among(_passage(record), map(_passage, _shuffled(others, rng)), rng)
    question = f"Question: {_words(record['question'], 'question').rstrip('?')}?"
    return Example(SYSTEM, chunks, question, _right(record["answers"]), LEAD)


def _passage(record: Any) -> str:
    """The gold context of an NQ question, its title first."""
    gold = next((context for context in record["ctxs"] if context.get("isgold")), record["ctxs"][0])
    return f"{_text(gold['title'], 'title')}: {_text(gold['text'], 'text')}"


def _shuffled(others: Sequence[Any], rng: random.Random) -> Iterator[Any]:
    return iter(rng.sample(others, len(others)))


def _among(gold: str, others: Iterator[str], rng: random.Random) -> tuple[str, ...]:
    """``gold`` at a random place among different passages."""
    chunks = [gold]
    while len(chunks) < PASSAGES and (other := next(others, None)) is not None:
        if other not in chunks:
            chunks.append(other)
    rng.shuffle(chunks)
    return tuple(chunks)


def _kv(record: Any, others: Sequence[Any], rng: random.Random) -> Example:
    """Some records, in their order, as the lines of a JSON object, cut into chunks of whole lines."""
    key, value = _words(record["key"], "key"), _words(record["value"], "value")
    pairs = [(_text(name, "key"), _text(content, "value")) for name, content in record["ordered_kv_records"]]
    if (key, value) not in pairs:
        raise ValueError("ordered_kv_records does not have the key with the value")
    asked = pairs.index((key, value))
    kept = rng.sample([index for index in range(len(pairs)) if index != asked], min(len(pairs), KV_RECORDS) - 1)
    lines = ['"{}": "{}"'.format(*pairs[index]) for index in sorted([asked, *kept])]
    size = -(-len(lines) // KV_CHUNKS)
    chunks = tuple(",\n".join(lines[start : start + size]) for start in range(0, len(lines), size))
    # Small models only copy the text after a key. With the key in the question, they would repeat the key.
    return Example(KV_SYSTEM, chunks, KV_QUESTION, (value,), f'"{key}": "')


FORMATS: dict[str, Callable[[Any, Sequence[Any], random.Random], Example]] = {
    "jsonl": _own,
    "squad": _squad,
    "nq": _nq,
    "kv": _kv,
}
"""Name → function that makes an example from a record, with distractors from the other records."""
