"""Rounds of traffic, in the engine's process: requests arrive, are computed, preempted or aborted, and leave nothing
behind."""

import itertools
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from tests.soak.faults import DiskFault, end_disk_fault, install_disk_faults, start_disk_fault, waited_for
from tests.soak.inside import NAME, Begun, BlockWatch, chunks_of, engine_state, preemptions, waiting_fills
from tests.soak.traffic import Ask, Kind, Traffic

T = TypeVar("T")

STEP = 256
"""Maximum number of tokens in a step of vLLM."""
MOST = 8
"""Maximum number of requests at a time."""
PATIENCE_S = 150.0
"""Seconds after the end of all faults in which everything has to be answered."""


@dataclass
class Answer:
    """A request that was answered."""

    number: int
    kind: Kind
    tokens: list[int]
    chunks: tuple[tuple[int, int], ...] | None
    """Spans in which the connector found chunks; ``None`` if the request was served as by plain vLLM."""
    ratio: float
    policy: str
    answer: list[int]
    logprobs: list[float]
    """Log-probabilities of the answer's tokens."""
    begins: list[Begun]
    """How its prompt was assembled: several times after a preemption."""
    report: dict[str, Any] | None


@dataclass
class Stall:
    """Time in which a request without chunks got no token, or could not begin."""

    seconds: float
    """Seconds that the engine was busy, without those in which other programs or other machines had the processor.
    Work of clients between steps does not count, because they are in the engine's process only in this test."""
    with_others: float
    """Seconds including the time of others."""
    steps: int
    end: int
    """The step that ended it."""
    during: str
    """Description of what the engine did meanwhile."""


@dataclass
class RoundOutcome:
    """Results of a round."""

    answers: list[Answer] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    aborted: int = 0
    preempted: int = 0
    steps: int = 0
    prefill_steps: list[float] = field(default_factory=list)
    """Seconds of steps that compute as many tokens of plain prompts as possible."""
    stalls: list[Stall] = field(default_factory=list)
    """The longest ones."""
    long_steps: list[Stall] = field(default_factory=list)
    """The longest steps. A request that arrives during a step waits for its end."""
    is_plain: bool = False
    """Whether no request had chunks, for comparison."""
    slow_calls: list[str] = field(default_factory=list)
    """What each rank did in steps that took long."""
    problems: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Running:
    ask: Ask
    chunks: tuple[tuple[int, int], ...] | None
    steps: int = 0
    since: float | None = None
    """Time of its last token, or of its arrival, by the engine's clock; ``None`` since it was preempted."""
    waited: float = 0.0
    """Seconds in which others had had the processor until then."""
    begun_at: int = 0
    """The step of that token."""
    preempted: int = 0
    count: int = 0
    begins: list[Begun] = field(default_factory=list)


class Session:
    """One engine's life."""

    def __init__(self, llm: Any, seed: int) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self._random = random.Random(seed)
        self._traffic = Traffic(llm.get_tokenizer(), random.Random(seed + 1))
        self._watch = BlockWatch(llm)
        llm.collective_rpc(install_disk_faults)
        self._running: dict[str, _Running] = {}
        self._faults = itertools.cycle(self._random.sample(get_args(DiskFault), 3))
        self._count = self._steps = self._rounds = 0
        self._busy = 0.0
        """The engine's clock: seconds that it was busy."""
        core = self._engine.engine_core
        core.add_request = self._timed(core.add_request)
        self._disk_fault, self._disk_until = "", 0.0

    def round(self, seconds: float, disk_faults: bool) -> RoundOutcome:
        """Run traffic for some seconds, and then until all of it is answered. In every third round no request has
        chunks, so that stalls can be compared with those of vLLM alone on the same machine."""
        self._rounds += 1
        outcome = self._outcome = RoundOutcome(is_plain=self._rounds % 3 == 0)
        self._traffic.is_plain = outcome.is_plain
        if self._random.random() < 0.4:
            self._engine.reset_prefix_cache()
        self._traffic.is_crowded = self._random.random() < 0.5
        is_lonely = self._random.random() < 0.25  # each request runs alone
        self._measure_prefill()
        end = time.monotonic() + seconds
        faults = sorted(
            self._random.uniform(0, 0.8) for _ in range(self._random.choice((1, 2)) if disk_faults else 0)
        )
        busy_from = time.monotonic()
        while time.monotonic() < end:
            if faults and time.monotonic() > busy_from + faults[0] * seconds:
                faults.pop(0)
                self._break_disk()
            if not is_lonely and not any(each.ask.kind == "plain" for each in self._running.values()):
                self._add(self._traffic.innocent(self._random.randint(20, 60), 100))
            wanted = 1 if is_lonely else MOST if self._traffic.is_crowded else self._random.randint(2, MOST)
            if len(self._running) < wanted and self._random.random() < 0.5:
                self._add(self._traffic.next())
            self._step()
        outcome.faults["disk calls hit"] += sum(self._llm.collective_rpc(end_disk_fault))
        deadline = time.monotonic() + PATIENCE_S
        while self._running and time.monotonic() < deadline:
            self._step()
        if self._running:
            outcome.problems.append(f"never answered: {[(n, r.ask.kind, r.count) for n, r in self._running.items()]}")
            self._engine.abort_request(list(self._running))
            self._running.clear()
        self._calm_down()
        outcome.state = engine_state(self._llm)
        outcome.problems += [f"left behind: {each}" for each in outcome.state["left"]]
        outcome.problems += [line for rank in self._llm.collective_rpc(waited_for) for line in rank]
        outcome.slow_calls, self._watch.slow_calls = self._watch.slow_calls, []
        return outcome

    def _measure_prefill(self) -> None:
        for number in range(4):
            ask = self._traffic.innocent(STEP, 1)
            self._engine.add_request(self._name("calm-"), {"prompt_token_ids": ask.tokens}, _sampling(ask))
            self._watch.after_step()
            begin, waited = time.monotonic(), self._watch.kept_waiting
            while self._engine.has_unfinished_requests():
                self._engine.step()
            took = time.monotonic() - begin
            self._watch.after_step()
            if number > 0:  # otherwise it may be the first of all
                self._outcome.prefill_steps.append(max(took / 10, took - self._watch.kept_waiting + waited))

    def _calm_down(self) -> None:
        """Run steps without requests, in which workers are told what to release, and missing chunks that still wait
        are filled."""
        deadline = time.monotonic() + PATIENCE_S
        for number in itertools.count():
            if number >= 2 and (not waiting_fills(self._llm) or time.monotonic() > deadline):
                return
            ask = self._traffic.innocent(9, 30)
            self._engine.add_request(self._name("calm-"), {"prompt_token_ids": ask.tokens}, _sampling(ask))
            while self._engine.has_unfinished_requests():
                self._engine.step()
                self._watch.after_step()

    def _break_disk(self) -> None:
        fault = next(self._faults)
        seconds = self._random.uniform(0.5, 4.0)
        self._outcome.faults[f"disk {fault}"] += 1
        self._disk_fault, self._disk_until = f"disk {fault} for {seconds:.1f} s", time.monotonic() + seconds + 0.5
        self._llm.collective_rpc(start_disk_fault, args=(fault, seconds))

    def _name(self, begin: str) -> str:
        self._count += 1
        return f"{begin}{self._count}"

    def _add(self, ask: Ask) -> None:
        name = self._name(NAME)
        prompt: dict[str, Any] = {"prompt_token_ids": ask.tokens}
        if ask.salt is not None:
            prompt["cache_salt"] = ask.salt
        self._outcome.requests[ask.kind] += 1
        now, waited = self._busy, self._watch.kept_waiting
        try:
            self._engine.add_request(name, prompt, _sampling(ask))
        except Exception:
            # vLLM itself may refuse it, and tells the client. An exception of ours would end the engine.
            if "kvmosaic/engines" in traceback.format_exc():
                raise
            self._outcome.requests["refused by vLLM"] += 1
            self._engine.abort_request([name])
            return
        running = _Running(ask, chunks_of(self._llm, name), since=now, waited=waited, begun_at=self._steps)
        self._running[name] = running

    def _step(self) -> None:
        if not self._running:
            time.sleep(0.001)
            return
        for name in [name for name, each in self._running.items() if each.ask.abort_after == each.steps]:
            self._engine.abort_request([name])
            del self._running[name]
            self._outcome.aborted += 1
        before, had_waited = self._busy, self._watch.kept_waiting
        outputs = self._timed(self._engine.step)()
        now = self._busy
        self._steps += 1
        self._outcome.steps += 1
        for begun in self._watch.after_step():
            if begun.name in self._running:
                self._running[begun.name].begins.append(begun)
        waited = self._watch.kept_waiting
        took = now - before
        step = Stall(took - (waited - had_waited), took, 1, self._steps, self._what_goes_on())
        self._outcome.long_steps = _longest([*self._outcome.long_steps, step])
        preempted = preemptions(self._llm)
        for name, each in self._running.items():
            each.steps += 1
            times = preempted.get(name, each.preempted)
            if times > each.preempted:
                self._outcome.preempted += times - each.preempted
                each.preempted = times
                each.since = None  # vLLM's own doing
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            said = output.outputs[0]
            if len(said.token_ids) > running.count:
                self._note_gap(running, now, waited)
                running.count = len(said.token_ids)
            if output.finished:
                self._finish(output, running)

    def _note_gap(self, running: _Running, now: float, waited: float) -> None:
        """Note a gap of a request without chunks. A first token may be late for vLLM's own reasons."""
        if running.ask.kind == "plain" and running.since is not None and running.count:
            wall = now - running.since
            own = wall - (waited - running.waited)
            stalls = [stall for stall in self._outcome.stalls if stall.end != self._steps or stall.seconds > own]
            if all(stall.end != self._steps for stall in stalls):
                stalls.append(Stall(own, wall, self._steps - running.begun_at, self._steps, self._what_goes_on()))
            self._outcome.stalls = _longest(stalls)
        running.since, running.waited, running.begun_at = now, waited, self._steps

    def _timed(self, function: Callable[..., T]) -> Callable[..., T]:
        """A function whose time counts as the engine's."""

        def timed(*args: Any, **kwargs: Any) -> T:
            begin = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self._busy += time.monotonic() - begin

        return timed

    def _what_goes_on(self) -> str:
        kinds = Counter(each.ask.kind for each in self._running.values())
        junk = [repr(each.ask.params)[:50] for each in self._running.values() if each.ask.kind == "junk"]
        disk = [self._disk_fault] if time.monotonic() < self._disk_until else []
        running = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        return "; ".join([*disk, *junk, running, self._watch.planned])

    def _finish(self, output: Any, running: _Running) -> None:
        del self._running[output.request_id]
        said, ask = output.outputs[0], running.ask
        params = ask.params if isinstance(ask.params, dict) else {}
        tokens = list(said.token_ids)
        self._outcome.answers.append(
            Answer(
                number=int(output.request_id.removeprefix(NAME)),
                kind=ask.kind,
                tokens=ask.tokens,
                chunks=running.chunks,
                ratio=params.get("recompute_ratio", 0.0) if ask.kind != "junk" else 0.0,
                policy=params.get("policy", "") if ask.kind != "junk" else "",
                answer=tokens,
                logprobs=[step[token].logprob for token, step in zip(tokens, said.logprobs, strict=True)],
                begins=running.begins,
                report=output.kv_transfer_params,
            )
        )
        self._traffic.answered(ask, tokens)


def _longest(stalls: list[Stall]) -> list[Stall]:
    return sorted(stalls, key=lambda stall: -stall.seconds)[:5]


def _sampling(ask: Ask) -> Any:
    from vllm import SamplingParams

    extra = None if ask.params is None else {"kv_transfer_params": ask.params}
    return SamplingParams(
        max_tokens=ask.outputs, temperature=0, ignore_eos=True, logprobs=1, detokenize=False, extra_args=extra
    )


_sessions: list[Session] = []


def begin(llm: Any, seed: int) -> list[int]:
    """Begin the life of an engine. Returns its sink prefix."""
    _sessions.append(Session(llm, seed))
    return list(_sessions[0]._watch.sink)


def play(llm: Any, seconds: float, disk_faults: bool) -> RoundOutcome:
    """Run a round. An error that ends the engine is also reported."""
    session = _sessions[0]
    try:
        return session.round(seconds, disk_faults)
    except Exception:
        session._outcome.problems.append(f"the engine ended: {traceback.format_exc()[-1500:]}")
        return session._outcome
