"""Chooses settings for a model: the cheapest that come close enough to a full prefill."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvmosaic import __version__
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.profile import Measured, Profile, Targets, profile_name
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.eval.base import Cell, Example, Row
from kvmosaic.eval.plan import ALL, RANDOM, make_cells, make_plan
from kvmosaic.eval.run import evaluate
from kvmosaic.eval.summary import summarise
from kvmosaic.eval.work_file import WorkFile


class Target(NamedTuple):
    """Targets for the difference from a full prefill."""

    max_kl: float
    min_top1: float

    def check(self) -> None:
        """Refuse values that cannot be targets."""
        if not 0 <= self.max_kl < math.inf:
            raise ConfigError(f"--max-kl {self.max_kl}: must be a number that is not negative")
        if not 0 <= self.min_top1 <= 1:
            raise ConfigError(f"--min-top1 {self.min_top1}: must be between 0 and 1")

    def missed_by(self, row: Row) -> int:
        """Number of the two targets that ``row`` misses. A result that is not a number misses its target."""
        return (not row.kl_mean <= self.max_kl) + (not row.top1 >= self.min_top1)

    def __str__(self) -> str:
        return f"KL <= {self.max_kl:g} and top-1 >= {self.min_top1:g}"


class Candidate(NamedTuple):
    """One choice of settings, and its results."""

    sink_prefix: str
    row: Row

    def __str__(self) -> str:
        row = self.row
        return (
            f"{row.policy} at ratio {row.ratio:g} with sink prefix {self.sink_prefix!r} "
            f"(KL {row.kl_mean:.4f}, top-1 {row.top1:.3f}, charged {row.charged_ratio:.3f})"
        )

    def as_dict(self) -> dict[str, Any]:
        return {"sink_prefix": self.sink_prefix, **self.row._asdict()}


def candidate_cells(policies: Sequence[str], ratios: Sequence[float]) -> tuple[Cell, ...]:
    """The cells to choose from: nothing recomputed, and every policy at every ratio. Recomputing everything is no
    candidate, because it saves nothing. Random tokens are a candidate only if asked for."""
    if ALL.ratio in ratios:
        raise ConfigError(f"--ratios {ALL.ratio:g}: recomputing everything saves nothing; choose smaller ones")
    cells = make_cells(policies, ratios)
    return tuple(cell for cell in cells if cell != ALL and (cell.policy != RANDOM or RANDOM in policies))


def measure(
    llm: LLM,
    examples: Sequence[Example],
    cells: Sequence[Cell],
    folder: Path,
    progress: Callable[[int], None] = lambda example: None,
) -> list[Candidate]:
    """Measure every cell with the sink prefix of ``llm``. Results are kept below ``folder``; existing ones are not
    measured again."""
    plan = make_plan(llm, examples, cells)
    with WorkFile(folder / plan.digest, plan.digest) as work:
        evaluate(llm, plan, work, progress)
    lines = summarise(work.scores, plan.cells, len(examples), llm.config.sink_prefix).lines
    return [Candidate(line.sink_prefix, line.row) for line in lines]


def cheapest(candidates: Iterable[Candidate], target: Target) -> Candidate | None:
    """The candidate with the lowest charged ratio among those that meet the target, and among equals the lowest KL.

    Charges within a percent of all tokens count as equal: at the same ratio, a policy's charge differs a little from
    prompt to prompt, and a worse choice should not win because of that.
    """
    good = [candidate for candidate in candidates if not target.missed_by(candidate.row)]
    return min(good, key=lambda one: (round(one.row.charged_ratio, 2), one.row.kl_mean), default=None)


def closest(candidates: Iterable[Candidate], target: Target) -> Candidate:
    """The candidate that misses the fewest targets, and among equals the one with the lowest KL."""
    return min(candidates, key=lambda one: (target.missed_by(one.row), one.row.kl_mean))


def advice(candidate: Candidate, target: Target) -> str:
    """The targets to ask for instead, which ``candidate`` would meet."""
    row, changes = candidate.row, []
    if row.kl_mean > target.max_kl:
        changes.append(f"--max-kl {math.ceil(row.kl_mean * 1e4) / 1e4:g}")
    if row.top1 < target.min_top1:
        changes.append(f"--min-top1 {math.floor(row.top1 * 1e3) / 1e3:g}")
    return f"add larger --ratios, or ask for {' '.join(changes)}"


def profile_of(
    model: str, chosen: Candidate, target: Target, policies: Sequence[str], data: str, seed: int
) -> Profile:
    """The profile that makes ``chosen`` the settings of ``model``."""
    row = chosen.row
    # At ratio 0 no policy was used. The profile names the first one, because "none" would ignore the ratio of a
    # request that sets its own.
    policy = row.policy if row.ratio else policies[0]
    return Profile(
        model=profile_name(model),
        policy=policy,
        recompute_ratio=row.ratio,
        sink_prefix=chosen.sink_prefix,
        measured=Measured(
            kl_mean=round(row.kl_mean, 6), top1=round(row.top1, 6), charged_ratio=round(row.charged_ratio, 6), n=row.n
        ),
        targets=Targets(**target._asdict()),
        data=data,
        seed=seed,
        kvmosaic=__version__,
    )
