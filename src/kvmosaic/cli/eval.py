"""``kvmosaic eval``: how close policies come to a full prefill, on the user's model and data."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import platformdirs
import typer

from kvmosaic.cli.output import JsonOption, console, print_json, print_line, print_table, progress_bar
from kvmosaic.core.errors import ConfigError

if TYPE_CHECKING:  # importing it for real takes seconds
    from kvmosaic.eval.metrics import Interval
    from kvmosaic.eval.summary import Summary

BETWEEN_POLICIES = re.compile(r",(?![^(]*\))")
"""A comma that is not inside brackets."""


def evaluate(
    model: Annotated[str, typer.Argument(help="Catalog name, folder or hub name.")],
    data: Annotated[str, typer.Option(help="File of examples, plain or .gz; or synthetic, synthetic-1, -2, -3.")],
    form: Annotated[str | None, typer.Option("--format", help="jsonl, squad, nq or kv; default: recognised.")] = None,
    policies: Annotated[str | None, typer.Option(help="Like composite,sink-link(k=8); default: all.")] = None,
    ratios: Annotated[
        str, typer.Option(help="Shares of chunk tokens to recompute; 0 and 1 always are.")
    ] = "0.02,0.05,0.1,0.15,0.3",
    limit: Annotated[int, typer.Option(help="Examples, at most.")] = 25,
    seed: Annotated[int, typer.Option(help="Chooses examples and distractors.")] = 0,
    max_answer: Annotated[
        int | None, typer.Option(help="Tokens of an answer, at most; default: what the right one needs, 16 to 64.")
    ] = None,
    sink_prefix: Annotated[
        str | None, typer.Option(help="bos, none, document, learned:FILE or a text: what chunks are filled after.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots to this file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for results; default: one in the user's cache.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare policies with a full prefill. Interrupted and started again, it goes on where it stopped."""
    from kvmosaic.eval.data import load  # here, because importing them takes seconds
    from kvmosaic.eval.plan import DEFAULT_POLICIES, make_cells, make_plan
    from kvmosaic.eval.report import render
    from kvmosaic.eval.run import evaluate
    from kvmosaic.eval.summary import summarise
    from kvmosaic.eval.work_file import WorkFile
    from kvmosaic.hf import LLM

    # Everything that can be wrong is looked at before the model is loaded.
    chosen = DEFAULT_POLICIES if policies is None else [part.strip() for part in BETWEEN_POLICIES.split(policies)]
    cells = make_cells(chosen, numbers(ratios))
    if max_answer is not None and max_answer < 1:
        raise ConfigError(f"--max-answer {max_answer}: must be at least 1")
    if sink_prefix == "":
        raise ConfigError("--sink-prefix: is empty; use none for no prefix")
    examples = load(data, limit, seed, form)
    check_file("--html", html)
    check_folder(output)
    settings: dict[str, Any] = {} if sink_prefix is None else {"sink_prefix": sink_prefix}
    with console.status(f"loading {model}"):
        # A store of its own: nothing of the user's is read or cleared.
        own: dict[str, Any] = {"disk_path": None, "remote": None, "tenant": "eval", "miss_policy": "fill-first"}
        llm = LLM(model, enable_chunk_cache=True, **own, **settings)
        plan = make_plan(llm, examples, cells, max_answer)
    folder = output or Path(platformdirs.user_cache_dir("kvmosaic")) / "eval" / plan.digest
    with llm, interruptible(), WorkFile(folder, plan.digest) as work, progress_bar(len(examples)) as steps:
        steps.start("examples")
        evaluate(llm, plan, work, lambda _: steps.done())
    summary = summarise(work.scores, plan.cells, len(examples), seed)
    title = f"{model} on {data}, {len(examples)} examples"
    _show(title, summary, json)
    print_line(f"\nresults of single examples: {work.path}", json)
    if html is not None:
        html.write_text(render(title, summary), encoding="utf-8")
        print_line(f"report: {html}", json)
    if json:
        about = {"model": model, "data": data, "seed": seed, "max_answer": max_answer, "results": str(work.path)}
        print_json({**about, **summary.as_dict()})


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with a line that says what became of the work, and the exit status of a signal."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("interrupted; what was done is kept, the same command goes on from there", style="yellow")
        raise typer.Exit(130) from None


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written hours later, when there is something to write."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: must be a file in a folder that exists")
    new = not path.exists()
    try:
        path.open("ab").close()  # asking for permission is not enough: root has it everywhere
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}); choose another file") from None


def check_folder(path: Path | None) -> None:
    """Make the folder of ``--output``."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: no folder can be there ({error.strerror}); choose another") from None


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ratios {text}: must be numbers with commas between them, like 0.05,0.15") from None


def _show(title: str, summary: "Summary", json: bool) -> None:
    print_table(
        f"{title}; KL and F1 with 95 % intervals",
        ("policy", "ratio", "charged", "KL", "KL p95", "top-1", "EM", "F1", "gap closed", "ms", "KL against random"),
        (
            (
                row.policy,
                f"{row.ratio:g}",
                f"{row.charged_ratio:.3f}",
                _interval(line.kl),
                row.kl_p95,
                row.top1,
                row.em,
                _interval(line.f1),
                "-" if row.gap_closed is None else f"{row.gap_closed:.0%}",
                f"{row.prefill_ms:.0f}",
                _interval(line.kl_to_random, "+"),
            )
            for line in summary.lines
            for row in (line.row,)
        ),
        json=json,
    )
    full, none = summary.full_prefill, summary.no_context
    print_line(f"\nfull prefill: EM {full.em:.3f}, F1 {full.f1:.3f}, {full.prefill_ms:.0f} ms", json)
    print_line(f"no context:   EM {none.em:.3f}, F1 {none.f1:.3f}, {none.prefill_ms:.0f} ms", json)


def _interval(interval: "Interval", sign: str = "") -> str:
    mean, low, high = (f"{value:{sign}.3f}" for value in interval)
    return f"{mean} [{low}, {high}]"
