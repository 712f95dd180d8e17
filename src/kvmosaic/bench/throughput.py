"""vLLM under RAG traffic with Poisson arrivals: latencies, and the highest request rate that meets an objective.

Plain vLLM with its prefix cache and vLLM with the chunk cache run one after the other, and get the same requests at
the same times. All documents have been seen before, except a number of new ones in every query where that is asked
for.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvmosaic.bench.engine import Model, machine, start
from kvmosaic.bench.process import ENGINES, compare, tell
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
    ratio: float,
    new: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Latencies of both engines at every rate, in requests per second. Each rate lasts for ``seconds``; ``outputs``
    tokens are generated per request. ``objective_ms``: target for the 90th percentile of the time to first token.
    ``new``: number of documents in each query that no earlier query had."""
    if new > corpus.per_query:
        raise ConfigError(f"{new} new documents per query: a query has only {corpus.per_query}")
    rates = sorted(rates)
    arguments = {
        "model": asdict(model),
        "corpus": asdict(corpus),
        "rates": rates,
        "seconds": seconds,
        "outputs": outputs,
        # A request without a first token after this time has missed the objective in any case.
        "grace": 2 * objective_ms / 1e3,
        "ratio": ratio,
        "new": new,
    }
    measured = compare(__name__, arguments, progress)
    rows = []
    for index, rate in enumerate(rates):
        row: dict[str, Any] = {"rate": rate, "requests": measured["plain"]["rates"][index].pop("requests")}
        assert row["requests"] == measured["reuse"]["rates"][index].pop("requests")
        for engine in ENGINES:
            row |= {f"{engine}_{name}": value for name, value in measured[engine]["rates"][index].items()}
        row["ttft_p50_speedup"] = row["plain_ttft_p50_ms"] / row["reuse_ttft_p50_ms"]
        rows.append(row)
    best = {f"{engine}_rate_at_objective": best_rate(rows, engine, objective_ms) for engine in ENGINES}
    return {"machine": measured["reuse"]["machine"], **arguments, "objective_ms": objective_ms, **best, "rows": rows}


def best_rate(rows: Sequence[dict[str, Any]], engine: str, objective_ms: float) -> float | None:
    """The highest rate at which nine of ten requests met the objective; ``None`` if there is none."""
    met = [row["rate"] for row in rows if row[f"{engine}_ttft_p90_ms"] <= objective_ms]
    return max(met, default=None)


def measure(
    engine: str,
    model: dict[str, Any],
    corpus: dict[str, Any],
    rates: Sequence[float],
    seconds: float,
    outputs: int,
    grace: float,
    ratio: float,
    new: int,
) -> dict[str, Any]:
    """Latencies of one engine at every rate. Requests that are unfinished ``grace`` seconds after the last arrival
    are aborted."""
    tell("starting vLLM")
    documents = Corpus(**corpus)
    llm = start(
        Model(**model),
        enable_chunk_cache=engine == "reuse",
        max_model_len=documents.prompt_tokens + outputs + 1024,
        max_num_batched_tokens=8192,
    )
    params = {"recompute_ratio": ratio} if engine == "reuse" else None
    load = _Load(Steps(llm), documents, outputs, new, params)
    tell("warming up")
    load.warm_up()
    results = []
    for rate in rates:
        tell(f"{rate:g} requests a second")
        results.append(load.offer(rate, seconds, grace))
    return {"machine": machine(), "rates": results}


class _Load:
    """Requests over a corpus, sent to one engine."""

    def __init__(self, steps: Steps, corpus: Corpus, outputs: int, new: int, params: dict[str, Any] | None) -> None:
        self._steps, self._corpus, self._outputs, self._new, self._params = steps, corpus, outputs, new, params
        self._texts, self._system = corpus.texts(), corpus.system()

    def warm_up(self) -> None:
        """Send every document once, and then a few requests of the measured kind."""
        rng, each = self._corpus.rng("warm-up"), self._corpus.per_query
        for first in range(0, self._corpus.documents, each):
            prompt = assemble(self._system, self._texts[first : first + each], rng)
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
            texts[place] = random_tokens(rng, self._corpus.document_tokens)
        return assemble(self._system, texts, rng)
