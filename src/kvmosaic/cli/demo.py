"""``kvmosaic demo``: a small RAG session that compares every request with its own full prefill."""

import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmosaic.cli.demo_data import DOCUMENTS, REQUESTS, Request
from kvmosaic.cli.demo_page import Compared, session_page
from kvmosaic.cli.eval import check_file
from kvmosaic.cli.output import JsonOption, ModelOption, console, print_json, print_line, print_table, progress_bar

WARM_UP = Request("warming up", "Be brief.", ("ferry",), "When does it leave?")


def demo(
    model: ModelOption = "smollm2-135m",
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per answer.")] = 24,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to this file that draws each request as a mosaic.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Ask several questions about the same documents, in changing order, under changing system prompts, and compare
    each answer and its time to first token with those of a full prefill."""
    check_file("--html", html)
    from kvmosaic.hf import LLM  # here, because importing it takes seconds

    with console.status(f"loading {model} (the first time, its weights are fetched)"):
        # The user's store is neither read nor cleared.
        llm = LLM(model, enable_chunk_cache=True, disk_path=None, remote=None, tenant="demo")
    compared = []
    with llm, progress_bar(2 * len(REQUESTS) + 1) as steps:
        steps.start("warming up")
        for cached in (True, False):  # torch's lazy set-up in first calls should not count for either side
            _ask(llm, WARM_UP, 2, use_chunk_cache=cached)
        llm.chunk_cache.clear()
        steps.done()
        for request in REQUESTS:
            steps.start(f"{request.title}: full prefill")
            full = _best(llm, request, max_tokens, use_chunk_cache=False)
            steps.done()
            steps.start(f"{request.title}: kvmosaic")
            ours = _best(llm, request, max_tokens, recompute_ratio=request.ratio)
            steps.done()
            compared.append(Compared(request, ours, full))
            times = f"first token after {ours.ttft_ms:.0f} ms, full prefill {full.ttft_ms:.0f} ms"
            steps.tell(f"{request.title}: {times}")
        stats, held = llm.chunk_cache.get_stats(), llm.chunk_cache.store.held()
    _show(model, compared, json)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)
    print_line(
        f"\nchunks: {stats['total_chunks']} stored, {stats['current_memory_mb']:.0f} MB in memory; "
        f"peak memory of this process: {peak:.0f} MB",
        json,
    )
    if html is not None:
        html.write_text(session_page(model, compared, held), encoding="utf-8")
        print_line(f"page: {html}", json)
    if json:
        print_json({"model": model, "requests": [_row(item) for item in compared], "stats": stats, "peak_mb": peak})


def _ask(llm: Any, request: Request, max_tokens: int, **options: Any) -> Any:
    from kvmosaic.engines.hf.chat import messages_about

    documents = [DOCUMENTS[name] for name in request.documents]
    messages = messages_about(request.system, documents, request.question)
    [answer] = llm.chat(messages, documents=documents, max_tokens=max_tokens, temperature=0, **options)
    return answer


def _best(llm: Any, request: Request, max_tokens: int, **options: Any) -> Any:
    """The answer, with the lower of two times to the first token, because other programs disturb single samples. A
    request with new documents is not repeated: the second time, it would find them cached."""
    first = _ask(llm, request, max_tokens, **options)
    if any(chunk.status != "cached" for chunk in first.chunks):
        return first
    again = _ask(llm, request, 1, **options)
    return replace(first, ttft_ms=min(first.ttft_ms, again.ttft_ms))


def _row(item: Compared) -> dict[str, Any]:
    return {
        "title": item.request.title,
        "mode": item.ours.mode,
        "recompute_ratio": item.request.ratio,
        "ttft_ms": item.ours.ttft_ms,
        "full_prefill_ttft_ms": item.full.ttft_ms,
        "prompt_tokens": item.ours.prompt_tokens,
        "cached_tokens": item.ours.cached_tokens,
        "computed_tokens": item.ours.prefilled_tokens + item.ours.filled_tokens,
        "recomputed_tokens": item.ours.recomputed_tokens,
        "text": item.ours.text,
        "full_prefill_text": item.full.text,
    }


def _show(model: str, compared: list[Compared], json: bool) -> None:
    print_table(
        f"{model}: time to first token, kvmosaic against full prefill in the same run",
        ("request", "mode", "tokens", "cached", "computed", "redone", "TTFT ms", "full ms", "speed-up"),
        (
            (
                item.request.title,
                item.ours.mode,
                item.ours.prompt_tokens,
                item.ours.cached_tokens,
                item.ours.prefilled_tokens + item.ours.filled_tokens,
                item.ours.recomputed_tokens,
                f"{item.ours.ttft_ms:.0f}",
                f"{item.full.ttft_ms:.0f}",
                f"{item.full.ttft_ms / item.ours.ttft_ms:.1f}x",
            )
            for item in compared
        ),
        json=json,
    )
    print_line(
        "\nplain: all documents are new; reuse: known ones come from the cache; redone: cached tokens recomputed",
        json,
    )
    for index, item in enumerate(compared, 1):
        print_line(f"\n{index}. {item.request.question}", json)
        print_line(f"   kvmosaic      {item.ours.text.strip()}", json)
        print_line(f"   full prefill  {item.full.text.strip()}", json)
