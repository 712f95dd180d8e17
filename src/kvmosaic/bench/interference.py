"""Inter-token times of decoding requests while a long prompt is blended.

They are compared with those while vLLM prefills such a prompt in steps of 2048 tokens, and while nothing else runs.
All cases run in one engine, in turns.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvmosaic.bench.engine import Model, machine, start
from kvmosaic.bench.process import run_apart, tell
from kvmosaic.bench.steps import Request, Steps, percentiles
from kvmosaic.bench.traffic import Corpus, Prompt, assemble, random_tokens

STEP_TOKENS = 2048
"""Maximum number of tokens that vLLM computes in a step."""
QUIET_STEPS = 20
"""Number of steps with only decoding, in every turn."""
SETTLING_STEPS = 3
"""Number of steps between two cases, so that no case measures leftovers of the one before."""
DECODER_TOKENS = 128
"""Prompt length of a decoding request, in tokens."""
CASES = ("nothing else", "prefill", "blend")


def run(
    model: Model,
    corpus: Corpus,
    decoders: int,
    policy: str,
    ratio: float,
    turns: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Inter-token times of ``decoders`` requests while a prompt of the whole corpus is prefilled or blended,
    ``turns`` times each."""
    arguments = {
        "model": asdict(model),
        "corpus": asdict(corpus),
        "decoders": decoders,
        "policy": policy,
        "ratio": ratio,
        "turns": turns,
    }
    measured = run_apart(__name__, arguments, progress)
    rows = [{"while": case, **measured["cases"][case]} for case in CASES]
    times = {row["while"]: row["itl_p99_ms"] for row in rows}
    return {
        "machine": measured["machine"],
        **arguments,
        "step_tokens": STEP_TOKENS,
        "blend_over_prefill_p99": times["blend"] / times["prefill"],
        "rows": rows,
    }


def measure(
    model: dict[str, Any], corpus: dict[str, Any], decoders: int, policy: str, ratio: float, turns: int
) -> dict[str, Any]:
    """Inter-token times of each case."""
    tell("starting vLLM")
    documents = Corpus(**corpus)
    llm = start(
        Model(**model),
        enable_chunk_cache=True,
        miss_policy="fill-first",
        max_model_len=documents.prompt_tokens + 4096,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=decoders + 1,
    )
    steps, rng = Steps(llm), documents.rng("prompts")
    texts, system = documents.texts(), documents.system()
    plainly = {"chunk_cache": False}
    params: dict[str, dict[str, Any]] = {"prefill": plainly, "blend": {"policy": policy, "recompute_ratio": ratio}}

    def prompt(case: str) -> Prompt:
        if case == "prefill":
            return Prompt(random_tokens(rng, documents.prompt_tokens), [])
        rng.shuffle(texts)
        return assemble(system, texts, rng)

    tell("warming up")
    for case in ("blend", "blend", "prefill"):  # the first fills the cache
        steps.add(prompt(case), 1, params[case])
        steps.finish()
    decoding = [
        # They decode until they are aborted.
        steps.add(Prompt(random_tokens(rng, DECODER_TOKENS), []), documents.prompt_tokens + 2048, params["prefill"])
        for _ in range(decoders)
    ]
    while not all(request.tokens for request in decoding):
        steps.step()
    gaps: dict[str, list[float]] = {case: [] for case in CASES}
    took: dict[str, list[float]] = {case: [] for case in CASES}
    for turn in range(turns):
        tell(f"turn {turn + 1} of {turns}")
        _repeat(steps, SETTLING_STEPS)
        begin = time.perf_counter()
        _repeat(steps, QUIET_STEPS)
        gaps["nothing else"] += _between(decoding, begin)
        for case in ("prefill", "blend"):
            coming = prompt(case)  # made before timing starts, because decoding requests would wait for it
            _repeat(steps, SETTLING_STEPS)
            begin = time.perf_counter()
            request = steps.add(coming, 1, params[case])
            while not request.is_finished:
                steps.step()
            gaps[case] += _between(decoding, begin)
            took[case].append(request.first_token_ms())
            if case == "blend":
                assert [chunk["status"] for chunk in request.chunks] == ["cached"] * len(texts), (
                    "not all chunks were reused"
                )
    assert not any(request.is_finished for request in decoding), "too many turns: a decoding request finished"
    steps.abort()
    cases = {
        case: {
            **percentiles("itl", values, (50, 99)),
            "itl_max_ms": max(values),
            **percentiles("ttft", took[case], (50,)),
            "tokens": len(values),
        }
        for case, values in gaps.items()
    }
    return {"machine": machine(), "cases": cases}


def _repeat(steps: Steps, count: int) -> None:
    for _ in range(count):
        steps.step()


def _between(decoding: list[Request], begin: float) -> list[float]:
    """Inter-token times since ``begin``."""
    return [gap for request in decoding for gap in request.gaps_ms(begin)]
