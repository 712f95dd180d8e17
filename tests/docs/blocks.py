"""The code blocks of the documentation, and the commands in them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("deploy/*.md")]
)
FERRY = " ".join(f"The ferry leaves pier {n} at noon, and calls at {n + 3} villages." for n in range(16))
BAKERY = " ".join(f"The bakery in street {n} belongs to the Meyer sisters since {1900 + n}." for n in range(16))
"""Two documents that the examples read from files."""
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s+# .*")
_INLINE = re.compile(r"`(?:\w+=\S+ )*(kvmosaic [^`]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    path: Path
    language: str
    code: str

    @property
    def name(self) -> str:
        """The file, and the first line of code, without what a shell prints before it."""
        first = _COMMENT.sub("", self.code.lstrip().splitlines()[0])
        return f"{self.path.relative_to(ROOT)}: {first.removeprefix('$ ')}"

    def commands(self) -> Iterator[str]:
        """The commands of a console block, each with its further lines, and without comments."""
        for command in re.split(r"^ *\$ ", self.code, flags=re.MULTILINE)[1:]:
            yield "\n".join(_COMMENT.sub("", line) for line in command.rstrip().splitlines())


def all_blocks() -> list[Block]:
    """Every block of every text."""
    return [
        Block(path, match["language"], match["code"]) for path in TEXTS for match in _BLOCK.finditer(path.read_text())
    ]


def block(name: str) -> Block:
    """The block with this name."""
    [found] = [each for each in all_blocks() if each.name == name]
    return found


def all_commands() -> list[str]:
    """Every command of every console block, once."""
    return list(dict.fromkeys(each for block in all_blocks() for each in block.commands()))


def inline_commands() -> list[str]:
    """Every use of our command that a sentence or a table names."""
    found = [each for path in TEXTS for each in _INLINE.findall(path.read_text())]
    return sorted({" ".join(each.split()) for each in found})
