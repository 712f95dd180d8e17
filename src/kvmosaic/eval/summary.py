"""Summary of the scores of single examples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmosaic.eval.base import Cell, Row
from kvmosaic.eval.metrics import Interval, bootstrap
from kvmosaic.eval.plan import ALL, FULL_PREFILL, NO_CONTEXT, NONE, RANDOM
from kvmosaic.eval.work_file import Score

SMALLEST_GAP = 0.01
"""Minimum difference in F1 between full prefill and no context that counts as a gap to be closed."""

Floats = npt.NDArray[np.float64]


class SummaryLine(NamedTuple):
    """A row, intervals of its numbers, and a comparison with random tokens at the same charged ratio.

    The comparison is paired: for each example, random's value at exactly the charged ratio of this cell is
    interpolated linearly between random's cells, the first of which is nothing recomputed and the last everything.
    """

    row: Row
    kl: Interval
    f1: Interval
    kl_to_random: Interval
    """Below 0: closer to full prefill than random."""
    f1_to_random: Interval
    sink_prefix: str
    """The setting that chunks were filled with."""
    entry_dtype: str
    """The setting that they were stored with."""

    @property
    def settings(self) -> dict[str, str]:
        return {"sink_prefix": self.sink_prefix, "entry_dtype": self.entry_dtype}

    def as_dict(self) -> dict[str, Any]:
        names = ("kl", "f1", "kl_to_random", "f1_to_random")
        cell = {**self.settings, "policy": self.row.policy, "ratio": self.row.ratio}
        return {**cell, **{name: getattr(self, name)._asdict() for name in names}}


class Reference(NamedTuple):
    """Results of one end of the scale."""

    em: float
    f1: float
    prefill_ms: float


class Summary(NamedTuple):
    """All cells, and the references that they are compared with."""

    lines: tuple[SummaryLine, ...]
    full_prefill: Reference
    no_context: Reference

    def as_dict(self) -> dict[str, Any]:
        return {
            "full_prefill": self.full_prefill._asdict(),
            "no_context": self.no_context._asdict(),
            "intervals": [line.as_dict() for line in self.lines],
            "rows": [{**line.settings, **line.row._asdict()} for line in self.lines],
        }

    @classmethod
    def joined(cls, summaries: "Sequence[Summary]") -> "Summary":
        """The lines of several settings. The references do not depend on them."""
        return summaries[0]._replace(lines=tuple(line for summary in summaries for line in summary.lines))


def summarise(
    scores: dict[tuple[int, Cell], Score],
    cells: Sequence[Cell],
    examples: int,
    sink_prefix: str,
    seed: int = 0,
    entry_dtype: str = "auto",
) -> Summary:
    """``scores`` must have every cell of every example; ``seed`` is that of the bootstrap."""
    table = {cell: [scores[i, cell] for i in range(examples)] for cell in (*cells, FULL_PREFILL, NO_CONTEXT)}
    full, none = _reference(table[FULL_PREFILL]), _reference(table[NO_CONTEXT])
    ladder = [table[cell] for cell in cells if cell in (NONE, ALL) or cell.policy == RANDOM]
    lines = tuple(
        _line(cell, table[cell], ladder, full.f1, none.f1, seed, sink_prefix, entry_dtype) for cell in cells
    )
    return Summary(lines, full, none)


def _reference(scores: Sequence[Score]) -> Reference:
    return Reference(
        float(np.mean([score.em for score in scores])),
        float(np.mean([score.f1 for score in scores])),
        float(np.median([score.prefill_ms for score in scores])),
    )


def _line(
    cell: Cell,
    scores: Sequence[Score],
    ladder: Sequence[Sequence[Score]],
    full_f1: float,
    none_f1: float,
    seed: int,
    *settings: str,
) -> SummaryLine:
    kl, f1, charged = _kl(scores), _f1(scores), _charged(scores)
    gap = full_f1 - none_f1
    row = Row(
        *cell,
        charged_ratio=float(charged.mean()),
        kl_mean=float(kl.mean()),
        kl_p95=float(np.quantile(np.concatenate([score.kl for score in scores]), 0.95)),
        top1=float(np.mean(np.concatenate([score.agree for score in scores]))),
        em=float(np.mean([score.em for score in scores])),
        f1=float(f1.mean()),
        gap_closed=float((f1.mean() - none_f1) / gap) if gap >= SMALLEST_GAP else None,
        prefill_ms=float(np.median([score.prefill_ms for score in scores])),
        n=len(scores),
    )
    steps = np.stack([_charged(rung) for rung in ladder])
    random_kl, random_f1 = (
        _read_off(charged, steps, np.stack([part(rung) for rung in ladder])) for part in (_kl, _f1)
    )
    return SummaryLine(
        row,
        bootstrap(kl, seed),
        bootstrap(f1, seed),
        bootstrap(kl - random_kl, seed),
        bootstrap(f1 - random_f1, seed),
        *settings,
    )


def _read_off(at: Floats, steps: Floats, values: Floats) -> Floats:
    """For each example, the value at ``at [examples]`` on the line through ``steps`` and ``values [rungs,
    examples]``."""
    return np.array([np.interp(x, steps[:, i], values[:, i]) for i, x in enumerate(at)])


def _kl(scores: Sequence[Score]) -> Floats:
    return np.array([np.mean(score.kl) for score in scores])


def _f1(scores: Sequence[Score]) -> Floats:
    return np.array([score.f1 for score in scores])


def _charged(scores: Sequence[Score]) -> Floats:
    return np.array([score.charged_ratio for score in scores])
