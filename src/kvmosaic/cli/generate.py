"""``kvmosaic generate``: answer one prompt."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmosaic.cli.output import JsonOption, ModelOption, console, print_json, print_table
from kvmosaic.core.errors import PromptError


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or the question about the documents; '-' reads stdin.")],
    model: ModelOption = "smollm2-135m",
    document: Annotated[
        list[Path] | None, typer.Option(help="Text file to put before the prompt; repeatable.")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt, when documents are given.")] = "",
    max_tokens: int = 64,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own setting.")] = None,
    recompute_ratio: Annotated[float, typer.Option(help="Share of reused tokens to recompute: 0.0 or 1.0.")] = 0.0,
    disk_path: Annotated[Path | None, typer.Option(help="Keep documents here for the next call.")] = None,
    json: JsonOption = False,
) -> None:
    """Answer one prompt, reusing the documents that were seen before."""
    from kvmosaic.hf import LLM  # here, because importing it takes seconds

    settings: dict[str, Any] = {} if disk_path is None else {"disk_path": disk_path}
    with LLM(model, enable_chunk_cache=True, recompute_ratio=recompute_ratio, **settings) as llm:
        text = sys.stdin.read() if prompt == "-" else prompt
        if document:
            text = llm.config.chunk_separator.join([system, *(_read(path) for path in document), text])
        [output] = llm.generate(text, max_tokens=max_tokens, temperature=temperature)
        print_table(
            f"{output.mode}: first token after {output.ttft_ms:.0f} ms",
            ("chunk", "tokens", "status", "where / why"),
            (
                (index, len(chunk.span), chunk.status, chunk.tier or chunk.reason)
                for index, chunk in enumerate(output.chunks)
            ),
        )
    if output.fallback_reason:
        console.print(f"chunk cache not used: {output.fallback_reason}", markup=False)
    if json:
        print_json(asdict(output))
    else:
        typer.echo(output.text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read document {path}: {error}") from None
