"""Finds where questions begin in a prompt, so that no document is found across one."""

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmosaic.core.occurrences import Needle

SEAM = 64
"""Maximum number of characters before a question that are compared."""
QUESTION = 256
"""Maximum number of characters of a question that are compared."""
NEAR = 8
"""Number of characters of the end of a text that are looked for in documents."""

_BLANKS = re.compile(rb"\s{0,64}")


class Seam(NamedTuple):
    """The beginning of a question behind another text of its message."""

    before: str
    """The end of that text."""
    question: str
    """The beginning of the question."""

    @classmethod
    def between(cls, before: str, question: str) -> "Seam":
        """The seam between two texts of any length."""
        return cls(before.strip()[-SEAM:], question.strip()[:QUESTION])

    def may_be_in(self, document: str) -> bool:
        """Whether ``document`` may extend over this seam: it continues behind the end of the text before, or begins
        in that end and continues with the question."""
        end = self.before[-NEAR:]
        at = document.find(end)
        if 0 <= at < len(document.rstrip()) - len(end):
            return True
        return self.question[: NEAR // 2] in document[: NEAR + SEAM]


class SeamNeedle(Needle):
    """Finds a seam: one of its sides is searched for, the other one is compared. White space may be between them."""

    __slots__ = ("_is_behind", "_other")

    def __init__(self, before: str, question: str) -> None:
        self._is_behind = len(before) >= len(question)
        super().__init__(before if self._is_behind else question)
        self._other = (question if self._is_behind else before).encode(errors="surrogatepass")

    def question_at(self, text: bytes, at: int) -> int:
        """Offset of the question, if what was searched for is at ``at`` and the other side is beside it; or -1."""
        if self._is_behind:
            blanks = _BLANKS.match(text, at + len(self.bytes))
            start = blanks.end() if blanks else 0
            return start if text.startswith(self._other, start) else -1
        before = text[max(0, at - len(self._other) - SEAM) : at].rstrip()
        return at if before.endswith(self._other) else -1


class Questions:
    """The beginnings of questions in a prompt."""

    def __init__(self, text: bytes, found: Sequence[tuple[int, SeamNeedle]]) -> None:
        """``found``: occurrences in ``text``."""
        self._starts = sorted({seam.question_at(text, at) for at, seam in found})

    def are_apart_from(self, start: int, end: int) -> bool:
        """Whether no question begins inside these bytes. A question at their start is a repeated document."""
        index = bisect_right(self._starts, start)
        return index == len(self._starts) or self._starts[index] >= end


def seam_needles(seams: Sequence[tuple[str, str]], normalize: Callable[[str], str]) -> list[SeamNeedle]:
    """The needles that find ``seams``, also in a prompt whose texts are normalised."""
    cut = [tuple(each.strip() for each in seam) for seam in seams]
    forms = dict.fromkeys([*cut, *((normalize(before), normalize(question)) for before, question in cut)])
    return [SeamNeedle(before, question) for before, question in forms if before and question]
