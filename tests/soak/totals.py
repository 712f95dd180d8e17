"""Results of a whole run: numbers and problems."""

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field

from tests.soak.session import RoundOutcome, Stall

MOST_STALL = 2.0
"""Maximum time that a request without chunks may wait for a token, in prefill steps. More is allowed if vLLM alone
takes longer, on a busy machine."""
MOST_SLOW_CALLS = 20
MOST_GROWTH = 96 * 2**20
"""Maximum growth of an engine's memory in a life, in bytes, once it is warm."""


@dataclass
class Totals:
    """Totals over all lives."""

    seed: int
    minutes: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    preempted: int = 0
    evicted: int = 0
    write_errors: int = 0
    chunk_hits: int = 0
    restarts: int = 0
    steps: int = 0
    wrong: int = 0
    prefill_steps: list[float] = field(default_factory=list)
    stalls: list[tuple[float, str, Stall]] = field(default_factory=list)
    """The longest stalls, in prefill steps of the same life."""
    longest_plain_stall: float = 0.0
    """The longest stall in rounds without chunks."""
    is_fluent: bool = True
    """Whether no life had a stall that was too long."""
    growth: float = 0.0
    """Largest growth of memory in any life, in bytes."""
    slow_calls: list[str] = field(default_factory=list)
    """What each rank did in steps that took long: the first ones."""
    problems: list[str] = field(default_factory=list)

    def add(self, outcome: RoundOutcome) -> None:
        """Add the results of a round."""
        self.requests += outcome.requests
        self.faults += outcome.faults
        self.aborted += outcome.aborted
        self.preempted += outcome.preempted
        self.steps += outcome.steps
        self.slow_calls = (self.slow_calls + outcome.slow_calls)[:MOST_SLOW_CALLS]

    def end_life(self, name: str, rounds: list[RoundOutcome]) -> None:
        """Add results that are known only at the end of a life."""
        steps = [seconds for outcome in rounds for seconds in outcome.prefill_steps]
        self.prefill_steps += steps
        if len(steps) > 1:
            unit = statistics.quantiles(steps, n=10)[-1]  # long ones of both kinds are compared
            plain = [stall.seconds / unit for each in rounds if each.is_plain for stall in each.stalls]
            ours = [stall for each in rounds if not each.is_plain for stall in each.stalls]
            self.longest_plain_stall = max([self.longest_plain_stall, *plain])
            self.is_fluent &= all(stall.seconds / unit <= max([MOST_STALL, *plain]) for stall in ours)
            self.stalls += [(stall.seconds / unit, name, stall) for stall in ours]
            self.stalls.sort(key=lambda found: -found[0])
            del self.stalls[8:]
        states = [outcome.state for outcome in rounds if outcome.state]
        if states:
            self.evicted += states[-1]["evictions"]
            self.write_errors += states[-1]["write_errors"]
            self.chunk_hits += states[-1]["hits"]
            sizes = [state["rss"] for state in states]
            growth = sizes[-1] - sizes[len(sizes) // 3]
            self.growth = max(self.growth, growth)
            if growth > MOST_GROWTH:
                self.problems.append(f"{name}: memory grew by {growth / 2**20:.0f} MiB")
            threads = [state["threads"] for state in states]
            if threads[-1] > threads[len(threads) // 3] + 8:
                self.problems.append(f"{name}: threads grew from {threads[len(threads) // 3]} to {threads[-1]}")

    @property
    def longest_stall(self) -> float:
        """The longest stall, in prefill steps."""
        return self.stalls[0][0] if self.stalls else math.nan

    @property
    def is_right(self) -> bool:
        tried = self.preempted > 0 and self.evicted > 0 and self.restarts > 0
        return tried and not self.wrong and not self.problems and self.is_fluent

    def table(self) -> str:
        """The totals as a Markdown table."""
        steps = self.prefill_steps or [math.nan]
        rows = {
            "seed": f"{self.seed}",
            "minutes": f"{self.minutes:.1f}",
            "requests": f"{sum(self.requests.values())} ({_listed(self.requests)})",
            "answers checked": f"{sum(self.checked.values())} ({_listed(self.checked)})",
            "steps": f"{self.steps}",
            "faults": _listed(self.faults) or "none",
            "aborted": f"{self.aborted}",
            "preemptions": f"{self.preempted}",
            "evictions": f"{self.evicted}",
            "entries that a tier could not store": f"{self.write_errors}",
            "chunks found": f"{self.chunk_hits}",
            "restarts": f"{self.restarts}",
            "memory growth of an engine": f"{self.growth / 2**20:.0f} MiB",
            "wrong answers": f"{self.wrong}",
            "other problems": f"{len(self.problems)}",
            "a prefill step": f"{statistics.median(steps) * 1e3:.0f} ms, at most {max(steps) * 1e3:.0f} ms",
            "longest stall of a request without chunks": f"{self.longest_stall:.1f} prefill steps",
            "the same while no request has chunks": f"{self.longest_plain_stall:.1f} prefill steps",
        }
        lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
        return "\n".join(lines)

    def details(self) -> str:
        """The problems and the longest stalls."""
        lines = [f"- {problem}" for problem in self.problems]
        lines += [
            f"- stall of {ratio:.1f} prefill steps ({stall.seconds * 1e3:.0f} ms; {stall.with_others * 1e3:.0f} ms "
            f"with what others had the processor for) over {stall.steps} step(s), {name}: {stall.during}"
            for ratio, name, stall in self.stalls
        ]
        lines += [f"- a long step, {each}" for each in self.slow_calls]
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
