"""Results, written to disk as they come in, so that an interrupted evaluation can continue where it stopped."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from kvmosaic.core.errors import ConfigError
from kvmosaic.eval.base import Cell


class Score(NamedTuple):
    """Results of one cell on one example."""

    example: int
    policy: str
    ratio: float
    charged_ratio: float
    kl: list[float]
    """KL from full prefill, after the prompt and after each token of the full-prefill answer but the last."""
    agree: list[bool]
    """Whether the most likely token is the same as in full prefill, at the places of ``kl``."""
    em: float
    f1: float
    prefill_ms: float
    answer: str

    @property
    def cell(self) -> Cell:
        return Cell(self.policy, self.ratio)


class WorkFile:
    """A file of JSON lines: a header with the plan's digest, then one line per score. Results of another plan are
    refused; a line that was cut off by an interruption is dropped."""

    def __init__(self, folder: Path, digest: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        self.scores: dict[tuple[int, Cell], Score] = {}
        header = {"kvmosaic": "eval", "plan": digest}
        self._file: IO[bytes] = open(self.path, "a+b")  # noqa: SIM115  # closed by __exit__
        try:
            if not self._read(header):
                self._write(header)
        except BaseException:
            self._file.close()
            raise

    def _read(self, header: dict[str, str]) -> bool:
        """Load the results in the file. Returns whether the file had any content."""
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found = json.loads(line)
                if number > 1:
                    self._keep(Score(**found))
            except (ValueError, TypeError):
                raise ConfigError(
                    f"{self.path}, line {number}: damaged; delete the file or choose another --output"
                ) from None
            if number == 1 and found != header:
                raise ConfigError(
                    f"{self.path} holds results of other settings, data or code; choose another --output"
                )
        self._file.truncate(len(whole))
        return bool(whole)

    def add(self, score: Score) -> None:
        """Add a score. The file has it before this returns."""
        self._write(score._asdict())
        self._keep(score)

    def _keep(self, score: Score) -> None:
        self.scores[score.example, score.cell] = score

    def _write(self, record: Mapping[str, object]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> "WorkFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
