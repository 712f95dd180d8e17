"""vLLM under RAG traffic with Poisson arrivals: latencies, and the highest request rate that meets an objective.

Plain vLLM with its prefix cache, vLLM with the chunk cache, and LMCache if that is asked for, run one after the
other, and get the same requests at the same times. All documents have been seen before, except a number of new ones
in every query where that is asked for.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvmosaic.bench import lmcache
from kvmosaic.bench.engine import Model, machine, start
from kvmosaic.bench.process import run_apart, tell
from kvmosaic.bench.steps import Request, Steps, hit_share, percentiles
from kvmosaic.bench.traffic import Corpus, Prompt, arrivals, assemble, popular, random_tokens
from kvmosaic.core.errors import ConfigError

WARM_UP = 8
"""Number of warm-up requests of the measured kind, which do not count."""


def run(
    model: Model,
    corpus: Corpus,
    rates: Sequence[float],
    seconds: float,
    outputs: int,
    objective_ms: float,
    ratios: Sequence[float],
    new: int,
    lmcache_ratio: float | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Latencies of all engines at every rate, in requests per second, one row for each engine, recompute ratio and
    rate. Each rate lasts for ``seconds``; ``outputs`` tokens are generated per request. ``objective_ms``: target for
    the 90th percentile of the time to first token. ``new``: number of documents in each query that no earlier query
    had. ``lmcache_ratio``: LMCache's recompute ratio; ``None``: LMCache is not measured."""
    if new > corpus.per_query:
        raise ConfigError(f"{new} new documents per query: a query has only {corpus.per_query}")
    if lmcache_ratio is not None:
        lmcache.check()
    asked = {
        "model": asdict(model),
        "corpus": asdict(corpus),
        "rates": sorted(rates),
        "seconds": seconds,
        "outputs": outputs,
        # A request without a first token after this time has missed the objective in any case.
        "grace": 2 * objective_ms / 1e3,
        "new": new,
    }
    engines: dict[str, Sequence[float | None]] = {"plain": (None,), "reuse": ratios}
    if lmcache_ratio is not None:
        engines["lmcache"] = (lmcache_ratio,)
    rows: list[dict[str, Any]] = []
    for engine, shares in engines.items():

        def told(text: str, engine: str = engine) -> None:
            progress(f"{engine}: {text}")

        measured = run_apart(__name__, {"engine": engine, "ratios": shares, **asked}, told)
        rows += ({"engine": engine, **row} for row in measured["rows"])
        if engine == "reuse":
            host = measured["machine"]
    best = {name: best_rate(rows, name, objective_ms) for name in dict.fromkeys(map(name_of, rows))}
    return {"machine": host, **asked, "objective_ms": objective_ms, "rate_at_objective": best, "rows": rows}


def name_of(row: dict[str, Any]) -> str:
    """The engine of a row, and its recompute ratio, if it has one."""
    return str(row["engine"]) if row["ratio"] is None else f"{row['engine']} {row['ratio']:.0%}"


def best_rate(rows: Sequence[dict[str, Any]], name: str, objective_ms: float) -> float | None:
    """The highest rate at which nine of ten requests met the objective; ``None`` if there is none."""
    met = [row["rate"] for row in rows if name_of(row) == name and row["ttft_p90_ms"] <= objective_ms]
    return max(met, default=None)


def measure(
    engine: str,
    model: dict[str, Any],
    corpus: dict[str, Any],
    rates: Sequence[float],
    seconds: float,
    outputs: int,
    grace: float,
    ratios: Sequence[float | None],
    new: int,
) -> dict[str, Any]:
    """Latencies of one engine at every ratio and rate. Requests that are unfinished ``grace`` seconds after the last
    arrival are aborted."""
    tell("starting vLLM")
    documents, shape = Corpus(**corpus), Model(**model)
    length = documents.prompt_tokens + outputs + 1024
    if engine == "lmcache":
        assert ratios[0] is not None
        room = 2 * documents.tokens * shape.token_bytes
        llm = lmcache.start(shape, ratios[0], room, max_model_len=length, max_num_batched_tokens=2 * length)
        lmcache.tune()
    else:
        llm = start(shape, enable_chunk_cache=engine == "reuse", max_model_len=length, max_num_batched_tokens=8192)
    rows = []
    for ratio in ratios:
        params = {"recompute_ratio": ratio} if engine == "reuse" else None
        shown = lmcache.separated if engine == "lmcache" else None
        load = _Load(Steps(llm), documents, outputs, new, params, shown)
        tell("warming up")
        load.warm_up()
        for rate in rates:
            tell(f"{rate:g} requests a second" + ("" if ratio is None else f", {ratio:.0%} recomputed"))
            rows.append({"ratio": ratio, "rate": rate, **load.offer(rate, seconds, grace)})
    return {"machine": machine(), "rows": rows}


class _Load:
    """Requests over a corpus, sent to one engine."""

    def __init__(
        self,
        steps: Steps,
        corpus: Corpus,
        outputs: int,
        new: int,
        params: dict[str, Any] | None,
        shown: Callable[[Prompt], Prompt] | None,
    ) -> None:
        """``params``: chunk-cache parameters; ``shown``: makes the prompts that the engine wants, if not these."""
        self._steps, self._corpus, self._outputs, self._new, self._params = steps, corpus, outputs, new, params
        self._shown = shown or (lambda prompt: prompt)
        # Documents that are new with one recompute ratio must be new with the next one as well.
        self._newly = corpus.rng(f"new documents {params}")
        self._texts, self._system = corpus.texts(), corpus.system()

    def warm_up(self) -> None:
        """Send every document once, and then a few requests of the measured kind."""
        rng, each = self._corpus.rng("warm-up"), self._corpus.per_query
        for first in range(0, self._corpus.documents, each):
            prompt = self._shown(assemble(self._system, self._texts[first : first + each], rng))
            # Documents are filled in decode steps, at least one per step, from the second one on.
            self._steps.add(prompt, 2 + each, self._params)
            self._steps.finish()
        queries = popular(self._corpus, rng)
        for _ in range(WARM_UP):
            self._steps.add(self._prompt(next(queries), rng), 2 + WARM_UP * self._new, self._params)
        self._steps.finish()

    def offer(self, rate: float, seconds: float, grace: float) -> dict[str, Any]:
        """Send requests at their arrival times, and measure latencies. Times to the first token count from a
        request's arrival, not from when the engine first looked at it. A request that never got one counts with the
        time that it waited."""
        rng, requests = self._corpus.rng(f"rate {rate:g}"), list[Request]()
        times = arrivals(rate, seconds, rng)
        queries = popular(self._corpus, rng)
        prompts = [self._prompt(next(queries), rng) for _ in times]
        begin = time.perf_counter()
        while self._steps.is_busy or len(requests) < len(times):
            now = time.perf_counter() - begin
            if now > times[-1] + grace:
                break
            while len(requests) < len(times) and times[len(requests)] <= now:
                number = len(requests)
                since = begin + times[number]
                requests.append(self._steps.add(prompts[number], self._outputs, self._params, since))
            if self._steps.is_busy:
                self._steps.step()
            else:
                time.sleep(max(0.0, times[len(requests)] - (time.perf_counter() - begin)))
        end = time.perf_counter()
        unsent = [Request(begin + at) for at in times[len(requests) :]]  # arrived during one very long step
        self._steps.abort()
        served = [request for request in requests if request.is_finished]
        took = max([seconds, *(request.tokens[-1] - begin for request in served)])
        return {
            "requests": len(times),
            **percentiles("ttft", [request.first_token_ms(end) for request in (*requests, *unsent)]),
            **percentiles("itl", [gap for request in requests for gap in request.gaps_ms()]),
            "completed_per_s": len(served) / took,
            "unfinished": len(times) - len(served),
            **({} if self._params is None else {"hit_share": hit_share(requests, self._corpus.per_query)}),
        }

    def _prompt(self, numbers: Sequence[int], rng: random.Random) -> Prompt:
        """A prompt of the documents with these numbers, some of them replaced by new ones."""
        texts = [self._texts[number] for number in numbers]
        for place in rng.sample(range(len(texts)), self._new):
            texts[place] = random_tokens(self._newly, self._corpus.document_tokens)
        return self._shown(assemble(self._system, texts, rng))
