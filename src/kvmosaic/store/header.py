"""The header of an entry. An attacker may have written it, so no number in it is used before it is bounded."""

import json
import re
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from kvmosaic.core.entry import ENTRY_KINDS, EntryKind, KVFormat
from kvmosaic.core.limits import shown
from kvmosaic.core.window import WindowTails
from kvmosaic.store.memory import Bytes

FORMAT_NAME = "kvmosaic-entry-2"
MAX_HEADER_BYTES = 256 * 1024
MOST = 10**6
"""Maximum of any count in a header: layers, heads, columns, tokens of a window."""
MOST_BYTES = 2**40
"""Maximum size of an entry, in bytes."""
MOST_CONTEXT_BYTES = 4 * 2**24
TENSORS = ("tokens", "context", "kv")
"""Names of an entry's tensors, in their order."""
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""Names of dtypes in safetensors."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
NUMBERS = "numbers"
"""Header field of entries in 8 bits. Other entries do not have it, as in earlier releases."""
_COUNT = re.compile(r"0|[1-9][0-9]{0,6}")


class Source(Protocol):
    """Where an entry's bytes come from."""

    nbytes: int

    def read(self, first: int, last: int) -> Bytes: ...


class Header(NamedTuple):
    """The metadata before the tensors, and where those are. The source has all their bytes and no others."""

    fields: dict[str, str]
    shape: list[int]
    """Shape of the KV, as a reader of safetensors sees it."""
    tokens: tuple[int, int]
    """Start and end (exclusive) of the tokens in the source, in bytes; ``context`` and ``kv`` have the same form."""
    context: tuple[int, int]
    kv: tuple[int, int]

    @property
    def kind(self) -> EntryKind | None:
        """The entry's kind, if the header has one that this release knows."""
        return next((kind for kind in ENTRY_KINDS if kind == self.fields.get("kind")), None)


def read_header(source: Source, most: int = MAX_HEADER_BYTES) -> Header:
    """Read a header of at most ``most`` bytes. Raises ``ValueError``, ``KeyError``, ``TypeError``, ``AttributeError``
    or ``RecursionError`` if it is invalid."""
    size = source.nbytes
    length = int.from_bytes(source.read(0, min(8, size)).tobytes(), "little")
    if length > min(size - 8, most, MAX_HEADER_BYTES):
        raise ValueError("not a safetensors file, or a truncated one")
    if size > MOST_BYTES:
        raise ValueError(f"{size} bytes exceed the maximum size of an entry")
    header: dict[str, Any] = json.loads(source.read(8, 8 + length).tobytes())
    fields = header.pop("__metadata__")
    if fields["format"] != FORMAT_NAME or not all(isinstance(value, str) for value in fields.values()):
        raise ValueError("not an entry of this format")
    if header.keys() != set(TENSORS):
        raise ValueError("its tensors are not those of an entry")
    end = start = 8 + length
    places = []
    for name in TENSORS:
        first, last = header[name]["data_offsets"]
        if type(first) is not int or type(last) is not int or start + first != end or not first <= last <= size:
            raise ValueError("the tensors do not follow one another")
        end = start + last
        places.append((start + first, end))
    if end != size:
        raise ValueError(f"{size} bytes instead of {end}")
    return Header(fields, header["kv"]["shape"], *places)


def format_fields(kv_format: KVFormat) -> dict[str, str]:
    """The header fields of a format, except for ``heads``."""
    return {
        "layers": str(kv_format.layers),
        "k_dim": str(kv_format.k_dim),
        "v_dim": str(kv_format.v_dim),
        "dtype": str(kv_format.dtype).removeprefix("torch."),
        "windowed": " ".join(map(str, kv_format.tails.layers)),
        "tail": str(kv_format.tails.tokens),
        **({NUMBERS: kv_format.numbers} if kv_format.is_int8 else {}),
    }


def check_format(header: Header, tokens: int, expected: KVFormat | None) -> KVFormat:
    """The format of an entry of ``tokens`` tokens. Raises ``ValueError`` if it is not the ``expected`` one, if given,
    or if its tensors do not have exactly the sizes of that format. Needs no tensor to be read or allocated."""
    fields = header.fields
    if expected is not None:
        said = format_fields(expected) | {"heads": str(expected.heads)}
        if any(fields[name] != text for name, text in said.items()) or fields.get(NUMBERS) != said.get(NUMBERS):
            raise ValueError("the entry's format differs from the engine's")
    names = ("layers", "heads", "k_dim", "v_dim", "dtype", "windowed", "tail")
    kv_format = expected or _format(*(fields[name] for name in names), fields.get(NUMBERS))
    if header.tokens[1] - header.tokens[0] != 4 * tokens:
        raise ValueError("the number of tokens differs from the one in the key")
    context_bytes = header.context[1] - header.context[0]
    if context_bytes % 4 or context_bytes > MOST_CONTEXT_BYTES:
        raise ValueError("the size of the context is invalid")
    if header.kv[1] - header.kv[0] != kv_format.nbytes(tokens):
        raise ValueError("the size of the KV does not match its format")
    if header.shape != [kv_format.heads, kv_format.num_elements(tokens)]:
        raise ValueError("the shape of the KV does not match its format")
    return kv_format


@lru_cache(maxsize=16)
def _format(
    layers: str, heads: str, k_dim: str, v_dim: str, dtype: str, windowed: str, tail: str, numbers: str | None
) -> KVFormat:
    tails = WindowTails(tuple(map(_count, windowed.split())), _count(tail))
    sizes = _count(layers), _count(heads), _count(k_dim), _count(v_dim)
    kv_format = KVFormat(*sizes, _DTYPES[dtype], tails, is_int8=numbers is not None)
    if kv_format.numbers != (numbers or ""):
        raise ValueError(f"unknown numbers: {shown(numbers)}")
    return kv_format


def _count(text: str) -> int:
    if not _COUNT.fullmatch(text) or int(text) > MOST:
        raise ValueError(f"not a count: {text[:20]!r}")
    return int(text)
