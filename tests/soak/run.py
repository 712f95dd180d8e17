"""The run: lives of an engine, rounds of traffic, and a check of every answer."""

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

from kvmosaic.models import resolve
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.tiny import write_tiny_text
from tests.soak.lives import ROUND_S, Life, lives
from tests.soak.reference import Reference
from tests.soak.session import RoundOutcome, begin, play
from tests.soak.totals import Totals
from tests.store.remote_servers import Valkey


class Soak:
    """One run of the soak."""

    def __init__(self, folder: Path, minutes: float, seed: int) -> None:
        self._minutes, self._folder = minutes, folder
        self._model = write_tiny_text(folder / "model", resolve("smollm2-135m"))
        self._reference = Reference(self._model)
        self._random = random.Random(seed)
        (folder / "server").mkdir()
        has_server = shutil.which("valkey-server") or shutil.which("redis-server")
        self._server = Valkey(folder / "server", persistent=True) if has_server else None
        self.totals = Totals(seed)

    def run(self) -> Totals:
        self._start = start = time.monotonic()
        try:
            for life in lives(self._minutes, self.totals.seed):
                self._live(life)
        finally:
            if self._server is not None:
                self._server.kill()
        self.totals.minutes = (time.monotonic() - start) / 60
        return self.totals

    def _live(self, life: Life) -> None:
        name = f"life {life.number} (seed {self.totals.seed}, {life.ranks} rank(s), {life.choices}, sink {life.sink})"
        remote = None if self._server is None else self._server.url
        rounds: list[RoundOutcome] = []
        try:
            with EngineApart(self._model, life.ranks, **life.settings(self._folder / "disk", remote)) as engine:
                engine.call(begin, life.seed)
                end = self._start + life.end * self._minutes * 60
                while not rounds or (time.monotonic() < end and not rounds[-1].problems):
                    rounds.append(self._round(engine, life, min(ROUND_S, self._minutes * 4)))
                    self._look_at(rounds[-1], life, name)
                if life.is_killed:
                    os.killpg(engine.pid, signal.SIGKILL)  # with its ranks
                    engine.kill()
                    self.totals.faults["engine killed"] += 1
        except AssertionError as error:
            self.totals.problems.append(f"{name}: {str(error)[-1500:]}")
        self.totals.restarts += life.number > 0
        self.totals.end_life(name, rounds)

    def _round(self, engine: EngineApart, life: Life, seconds: float) -> RoundOutcome:
        timers: list[threading.Timer] = []
        if life.has_remote and self._server is not None and self._random.random() < 0.6:
            dies = self._random.uniform(0, seconds / 2)
            timers += [
                threading.Timer(dies, self._server.kill),
                threading.Timer(dies + self._random.uniform(1, seconds / 3), self._server.start),
            ]
            self.totals.faults["remote killed"] += 1
        for timer in timers:
            timer.start()
        try:
            outcome: RoundOutcome = engine.call(play, seconds, life.has_disk)
        finally:
            for timer in timers:
                timer.join()
        return outcome

    def _look_at(self, outcome: RoundOutcome, life: Life, name: str) -> None:
        totals, known = self.totals, len(self.totals.problems)
        totals.add(outcome)
        totals.problems += [f"{name}: {problem}" for problem in outcome.problems]
        for answer in outcome.answers:
            how, problem = self._reference.problem(answer, life.sink)
            totals.checked[how] += 1
            if problem is not None:
                totals.wrong += 1
                totals.problems.append(
                    f"{name}: wrong answer to {answer.kind} request {answer.number} (ratio {answer.ratio:g}, "
                    f"{answer.policy}, {how}, {len(answer.begins) - 1} preemption(s)): {problem}"
                )
        done = sum(totals.checked.values())
        print(f"{name}: {done} answers, {totals.wrong} wrong, {len(totals.problems)} problems", flush=True)
        for problem in totals.problems[known:][:5]:  # all are printed at the end, which may be half an hour later
            print(f"  {problem}", flush=True)
        outcome.answers.clear()


def soak(minutes: float, seed: int) -> Totals:
    """Run for about this many minutes."""
    with tempfile.TemporaryDirectory(prefix="kvmosaic-soak-") as folder:
        return Soak(Path(folder), minutes, seed).run()
