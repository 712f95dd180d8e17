"""Time to first token of everything that reuses documents, in one run: plain vLLM, kvmosaic, and LMCache if it is
there. Each engine runs in a separate process, one after the other."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvmosaic.bench import lmcache
from kvmosaic.bench.engine import Model
from kvmosaic.bench.process import run_apart

PLACES = (("GPU", "device", "auto"), ("host memory, in 8 bits", "host", "int8"), ("host memory", "host", "auto"))
"""Where documents are: as people say it, kvmosaic's tier, and the number format there."""


def run(
    context: int,
    model: Model,
    ratios: Sequence[float],
    lmcache_ratio: float | None,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Median milliseconds of ``repeats`` prompts of ``context`` tokens, in known documents of 512 tokens in a new
    order. Each row is compared with a full prefill in the same engine. ``lmcache_ratio``: LMCache's recompute ratio;
    ``None``: LMCache is not measured."""
    if lmcache_ratio is not None:
        lmcache.check()
    asked = {"model": asdict(model), "context": context, "repeats": repeats}
    rows: list[dict[str, Any]] = []

    def add(engine: str, documents: str, ratio: float | None, ms: float, full_ms: float) -> None:
        row = {"engine": engine, "documents_in": documents, "ratio": ratio, "first_token_ms": ms}
        rows.append({**row, "full_ms": full_ms, "speedup": full_ms / ms})
        progress(f"{engine}{'' if ratio is None else f', {ratio:.0%}'}: {ms:.1f} ms, full prefill {full_ms:.1f} ms")

    machine: dict[str, str] = {}
    for place, tier, entry_dtype in PLACES:

        def told(text: str, place: str = place) -> None:
            progress(f"documents in {place}: {text}")

        found = run_apart(
            "kvmosaic.bench.ttft", {**asked, "tier": tier, "ratios": ratios, "entry_dtype": entry_dtype}, told
        )
        machine |= found["machine"]
        if not rows:
            full, hit = found["rows"][0]["full_ms"], found["rows"][0]["prefix_hit_ms"]
            add("plain vLLM", "", None, full, full)
            add("plain vLLM, prefix hit", place, None, hit, full)
        for row in found["rows"]:
            add("kvmosaic", place, row["ratio"], row["reuse_ms"], row["full_ms"])
    if lmcache_ratio is not None:
        found = run_apart("kvmosaic.bench.lmcache", {**asked, "ratio": lmcache_ratio}, progress)
        machine |= found["machine"]
        for name, ms in (("patched to run", found["as_shipped_ms"]), ("tuned as well", found["tuned_ms"])):
            add(f"LMCache CacheBlend, {name}", "host memory", lmcache_ratio, ms, found["full_ms"])
    return {"machine": machine, "context": context, "rows": rows}
