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
class Waits:
    """The longest times that requests waited for, of all lives."""

    found: list[tuple[float, str, Stall]] = field(default_factory=list)
    """In prefill steps of the same life, the name of the life, and more about it; the longest first."""
    longest_plain: float = 0.0
    """The longest one in rounds without chunks, in prefill steps."""
    too_long: list[str] = field(default_factory=list)
    """Lives with one that is too long, and longer than any of the same life's rounds without chunks."""

    def add(self, name: str, unit: float, ours: list[Stall], plain: list[Stall]) -> None:
        """Add those of a life: in rounds with chunks, and in ``plain`` ones. ``unit``: seconds of a prefill step."""
        in_plain = max((stall.seconds / unit for stall in plain), default=0.0)
        self.longest_plain = max(self.longest_plain, in_plain)
        if any(stall.seconds / unit > max(MOST_STALL, in_plain) for stall in ours):
            self.too_long.append(f"{name}; at most {in_plain:.1f} prefill steps without chunks")
        found = [*self.found, *((stall.seconds / unit, name, stall) for stall in ours)]
        self.found = sorted(found, key=lambda each: -each[0])[:8]

    @property
    def longest(self) -> float:
        """The longest one in rounds with chunks, in prefill steps."""
        return self.found[0][0] if self.found else math.nan


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
    stalls: Waits = field(default_factory=Waits)
    """Times in which a request without chunks got no token."""
    long_steps: Waits = field(default_factory=Waits)
    """Single steps. A request that arrives during a step waits for its end."""
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
            for waits, of in ((self.stalls, "stalls"), (self.long_steps, "long_steps")):
                found = [(each.is_plain, stall) for each in rounds for stall in getattr(each, of)]
                plain = [stall for is_plain, stall in found if is_plain]
                waits.add(name, unit, [stall for is_plain, stall in found if not is_plain], plain)
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
    def is_right(self) -> bool:
        tried = self.preempted > 0 and self.evicted > 0 and self.restarts > 0
        too_long = self.stalls.too_long + self.long_steps.too_long
        return tried and not self.wrong and not self.problems and not too_long

    def table(self) -> str:
        """The totals as a Markdown table."""
        steps = self.prefill_steps or [math.nan]
        halting = {*self.stalls.too_long, *self.long_steps.too_long}
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
            "longest stall of a request without chunks": f"{self.stalls.longest:.1f} prefill steps",
            "longest stall while no request has chunks": f"{self.stalls.longest_plain:.1f} prefill steps",
            "longest single step": f"{self.long_steps.longest:.1f} prefill steps",
            "longest single step while no request has chunks": f"{self.long_steps.longest_plain:.1f} prefill steps",
            "lives with a stall or step that is too long": f"{len(halting)}",
        }
        lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
        return "\n".join(lines)

    def details(self) -> str:
        """The problems and the longest stalls."""
        lines = [f"- {problem}" for problem in self.problems]
        for what, waits in (("stall", self.stalls), ("step", self.long_steps)):
            lines += [
                f"- {what} of {ratio:.1f} prefill steps ({stall.seconds * 1e3:.0f} ms; with others' time "
                f"{stall.with_others * 1e3:.0f} ms) over {stall.steps} step(s), {name}: {stall.during}"
                for ratio, name, stall in waits.found
            ]
            lines += [f"- {what}s that are too long: {name}" for name in waits.too_long]
        lines += [f"- a long step, {each}" for each in self.slow_calls]
        return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
