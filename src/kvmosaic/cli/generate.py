"""``kvmosaic generate``: answer one prompt."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmosaic.cli.output import JsonOption, ModelOption, console, print_json
from kvmosaic.core.config import load_config
from kvmosaic.core.errors import PromptError
from kvmosaic.core.limits import shown


def generate(
    context: typer.Context,
    prompt: Annotated[
        str,
        typer.Argument(help="Prompt, or question about the documents given by --document; '-' reads it from stdin."),
    ],
    model: ModelOption = "smollm2-135m",
    document: Annotated[
        list[Path] | None,
        typer.Option(help="Text file that is put before the prompt as a document; may be repeated."),
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of the answer.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; 0 is greedy. Default: the model's own generation setting."),
    ] = None,
    recompute_ratio: Annotated[
        float | None,
        typer.Option(help="Share of reused document tokens to recompute: 0 for none, 1 for all (exact)."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policy that chooses which reused tokens to recompute, like composite or 'sink-link(k=8)'."
        ),
    ] = None,
    disk_path: Annotated[
        Path | None, typer.Option(help="Directory in which the KV of documents is kept for later calls.")
    ] = None,
    remote: Annotated[
        str | None, typer.Option(help="URL of a remote store for the KV of documents, like valkey://host:6379/0.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Answer one prompt with the embedded engine, reusing the KV of documents that are already stored."""
    if context.args:  # a model in front, as in other commands, or a prompt without quotes
        raise PromptError(
            f"one prompt is expected, but {shown(context.args[0])} follows {shown(prompt)}; quote a prompt with "
            "spaces, and name a model with --model"
        )
    given = {"disk_path": disk_path, "remote": remote, "recompute_ratio": recompute_ratio, "policy": policy}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    documents = [_read(path) for path in document or ()]
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise PromptError("the prompt is empty; give at least one token")
    load_config(**settings)  # reports wrong settings before the imports below, which take seconds

    from kvmosaic.engines.hf.chat import messages_about
    from kvmosaic.hf import LLM  # importing it takes seconds

    with console.status(f"loading {model}"):
        llm = LLM(model, enable_chunk_cache=True, **settings)
    with llm:
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        if documents or system:
            messages = messages_about(system, documents, text)
            [output] = llm.chat(messages, documents=documents, **options)
        else:
            [output] = llm.generate(text, **options)
    if json:
        print_json(asdict(output))
        return
    typer.echo(output.text)
    for index, chunk in enumerate(output.chunks, 1):
        console.print(f"chunk {index}: {len(chunk.span)} tokens {chunk.status} ({chunk.tier or chunk.reason})")
    why = f" ({output.fallback_reason})" if output.fallback_reason else ""
    console.print(f"{output.mode}{why}: first token after {output.ttft_ms:.0f} ms", markup=False)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read document {path}: {error}") from None
