"""Time to first token inside vLLM: full prefill, prefix-cache hit, and reuse in a new order, in one run."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvmosaic.bench.engine import Model, machine, start
from kvmosaic.bench.process import tell
from kvmosaic.bench.traffic import SYSTEM_TOKENS, Prompt, assemble, random_tokens
from kvmosaic.core.accelerator import accelerator_there
from kvmosaic.core.errors import KvmosaicError

CHUNK_TOKENS = 512


def run(
    context: int,
    model: Model,
    tier: str,
    policies: Sequence[str] = ("composite",),
    ratios: Sequence[float] = (0.0,),
    repeats: int = 5,
    entry_dtype: str = "auto",
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Median milliseconds over ``repeats`` prompts of ``context`` tokens in chunks of 512, each time in a new order,
    with all chunks cached in ``tier`` (``device`` or ``host``): by full prefill, by a hit in vLLM's prefix cache, and
    by reuse with every policy and ratio. Ratio 0 is measured once, because there all policies are the same. Reuse is
    measured after a known system prompt and after a new one. ``entry_dtype``: number format of stored chunks."""
    if tier == "device" and accelerator_there() is None:
        raise KvmosaicError("--tier device needs a GPU; use --tier host")
    progress("starting vLLM")
    llm = start(
        model,
        enable_chunk_cache=True,
        miss_policy="fill-first",
        entry_dtype=entry_dtype,
        chunk_cache_gpu_memory_fraction=0.15 if tier == "device" else 0.0,
        host_memory="40GiB",
        max_model_len=context + 4096,
        max_num_batched_tokens=8192,
    )
    from vllm import SamplingParams  # after start(), which tells vLLM how to run

    rng = random.Random(0)

    def prompt(system: list[int]) -> Prompt:
        rng.shuffle(documents)
        return assemble(system, documents, rng)

    def first_token_ms(ids: list[int], **params: Any) -> float:
        sampling = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, extra_args={"kv_transfer_params": params}
        )
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    documents = [random_tokens(rng, CHUNK_TOKENS) for _ in range(context // CHUNK_TOKENS)]
    known_system = random_tokens(rng, SYSTEM_TOKENS)
    cases = dict.fromkeys(("none" if ratio == 0 else policy, ratio) for ratio in ratios for policy in policies)
    peers: dict[str, list[float]] = {"full_ms": [], "prefix_hit_ms": []}
    ours: dict[tuple[str, float], dict[str, list[float]]] = {
        case: {"reuse_ms": [], "reuse_new_system_ms": []} for case in cases
    }
    for number in range(-1, repeats):  # the first round fills the cache and warms up; it does not count
        progress(f"round {number + 1} of {repeats}")
        plain, _ = prompt(random_tokens(rng, SYSTEM_TOKENS))
        measured = [(times, first_token_ms(plain, chunk_cache=False)) for times in peers.values()]
        for (policy, ratio), columns in ours.items():
            # Now vLLM's own cache has to hold the known system prompt, and no chunks in the same order.
            llm.reset_prefix_cache()
            first_token_ms([*known_system, *random_tokens(rng, 1)], chunk_cache=False)
            for system, times in zip(
                (known_system, random_tokens(rng, SYSTEM_TOKENS)), columns.values(), strict=True
            ):
                ids, boundaries = prompt(system)
                took = first_token_ms(ids, boundaries=boundaries, policy=policy, recompute_ratio=ratio)
                measured.append((times, took))
        if number >= 0:
            for times, took in measured:
                times.append(took)
    requests = 2 * len(cases) * (repeats + 1)
    stats = llm.get_stats()
    hits = {name: count for name, count in stats["hits_by_tier"].items() if count}
    # The first request's documents are filled, in its own step or in the steps before it.
    assert set(hits) == {tier}, f"chunks came from {', '.join(hits)}, not only from {tier}"
    assert hits[tier] >= (requests - 1) * len(documents), f"only {hits[tier]} chunks came from {tier}"
    base = {name: statistics.median(times) for name, times in peers.items()}
    rows = []
    for (policy, ratio), columns in ours.items():
        mine = {name: statistics.median(times) for name, times in columns.items()}
        rows.append(
            {
                "context": context,
                "layers": model.layers,
                "tier": tier,
                "eager": model.eager,
                "policy": policy,
                "ratio": ratio,
                **base,
                **mine,
                "speedup": base["full_ms"] / mine["reuse_ms"],
                "against_prefix_hit": mine["reuse_ms"] / base["prefix_hit_ms"],
            }
        )
    return {"machine": machine(), "rows": rows}


def measure(model: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """The result of :func:`run`, for measurements in separate processes."""
    return run(model=Model(**model), progress=tell, **arguments)
