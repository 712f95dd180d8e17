"""Cost of the chunk cache for requests without chunks: vLLM's step time with and without it."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvmosaic.bench.engine import Model, machine, start
from kvmosaic.bench.process import run_apart, tell
from kvmosaic.bench.traffic import random_tokens

REQUESTS = 8
PROMPT_TOKENS = 512


def run(model: Model, turns: int, repeats: int, outputs: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds of a decode step, and of prefilling a batch, for both engines. They are medians over ``turns``
    starts of each engine, each computed from medians of ``repeats`` batches, with ``outputs`` tokens per answer."""
    times: dict[str, list[dict[str, Any]]] = {"plain": [], "chunk_cache": []}
    for turn in range(turns):
        for engine, results in times.items():
            progress(f"turn {turn + 1} of {turns}: {engine}")
            arguments = {"engine": engine, "model": asdict(model), "repeats": repeats, "outputs": outputs}
            results.append(run_apart(__name__, arguments, progress))
    rows = []
    for step in ("decode_step_ms", "prefill_ms"):
        medians = {engine: statistics.median(result[step] for result in results) for engine, results in times.items()}
        rows.append({"step": step, **medians, "overhead": medians["chunk_cache"] / medians["plain"] - 1})
    return {"machine": times["plain"][0]["machine"], "model": asdict(model), "rows": rows}


def measure(engine: str, model: dict[str, Any], repeats: int, outputs: int) -> dict[str, Any]:
    """Times of one engine."""
    llm = start(Model(**model), enable_chunk_cache=engine == "chunk_cache", max_model_len=4096)
    from vllm import SamplingParams  # after start(), which tells vLLM how to run

    rng = random.Random(0)

    def seconds(length: int) -> float:
        prompts = [{"prompt_token_ids": random_tokens(rng, PROMPT_TOKENS)} for _ in range(REQUESTS)]
        sampling = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    tell(f"measuring: {engine}")
    seconds(outputs)
    first = statistics.median(seconds(1) for _ in range(repeats))
    whole = statistics.median(seconds(outputs) for _ in range(repeats))
    decode = (whole - first) / (outputs - 1)
    return {"machine": machine(), "prefill_ms": first * 1e3, "decode_step_ms": decode * 1e3}
