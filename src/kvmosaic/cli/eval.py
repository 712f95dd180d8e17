"""``kvmosaic eval``: how close policies come to a full prefill, on the user's model and data."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
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
"""Matches a comma that is not inside brackets."""


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="Model to measure: a catalog name (see `kvmosaic models ls`), a folder, or a Hugging Face name "
            "like owner/name."
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="File of examples (plain or .gz); or built-in examples: synthetic, or synthetic-1, synthetic-2 and "
            "synthetic-3 for questions that need one, two or three documents."
        ),
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of the --data file: jsonl, squad, nq or kv. Default: recognised from its content.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Policies to measure, separated by commas, like 'composite,sink-link(k=8)'. A policy chooses which "
            "tokens to recompute. Default: all."
        ),
    ] = None,
    ratios: Annotated[
        str,
        typer.Option(help="Shares of chunk tokens to recompute, separated by commas; 0 and 1 are always included."),
    ] = "0.02,0.05,0.1,0.15,0.3",
    limit: Annotated[int, typer.Option(help="Maximum number of examples to measure.")] = 25,
    seed: Annotated[
        int, typer.Option(help="Random seed that chooses the examples, and the other documents in their prompts.")
    ] = 0,
    max_answer: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens per answer. Default: as many as the right answer needs, 16 to 64."
        ),
    ] = None,
    sink_prefix: Annotated[
        list[str] | None,
        typer.Option(
            help="Prefix that precedes every chunk when its KV is computed: bos, none, document, learned:FILE, or a "
            "literal text. Repeat the option to compare several. Default: the model's own setting."
        ),
    ] = None,
    entry_dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Number format of stored chunks: auto (the model's own) or int8. Repeat the option to compare both. "
            "Default: the setting entry_dtype."
        ),
    ] = None,
    chunk_sources: Annotated[
        str,
        typer.Option(
            help="Source of chunks: documents (every document is named), or auto (recurring text, as a server finds "
            "it after two other prompts with the same documents)."
        ),
    ] = "documents",
    html: Annotated[Path | None, typer.Option(help="Write an HTML report with plots to this file.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results of each example. Default: a folder in the user's cache."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure how close answers from reused chunks come to a full prefill, for every policy and recompute ratio. An
    interrupted run continues where it stopped when it is started again."""
    from kvmosaic.eval.advice import sentence  # here, because importing them takes seconds
    from kvmosaic.eval.data import load
    from kvmosaic.eval.plan import AUTO, DEFAULT_POLICIES, NAMED, make_cells, make_plan
    from kvmosaic.eval.report import render
    from kvmosaic.eval.run import evaluate
    from kvmosaic.eval.summary import Summary, summarise
    from kvmosaic.eval.work_file import WorkFile
    from kvmosaic.hf import LLM

    # All options are checked before the model is loaded.
    chosen = DEFAULT_POLICIES if policies is None else [part.strip() for part in BETWEEN_POLICIES.split(policies)]
    cells = make_cells(chosen, numbers(ratios))
    if max_answer is not None and max_answer < 1:
        raise ConfigError(f"--max-answer {max_answer}: must be at least 1")
    if chunk_sources not in (NAMED, AUTO):
        raise ConfigError(f"--chunk-sources {chunk_sources}: choose {NAMED} or {AUTO}")
    if "" in (sink_prefix or []):
        raise ConfigError("--sink-prefix is empty; use none for no prefix")
    examples = load(data, limit, seed, form)
    check_file("--html", html)
    check_folder(output)
    sinks: list[dict[str, Any]] = [{"sink_prefix": sink} for sink in dict.fromkeys(sink_prefix or [])] or [{}]
    dtypes: list[dict[str, Any]] = [{"entry_dtype": dtype} for dtype in dict.fromkeys(entry_dtype or [])] or [{}]
    given = [{**sink, **dtype} for sink, dtype in product(sinks, dtypes)]
    # A separate store: the user's store is neither read nor cleared.
    own: dict[str, Any] = {"disk_path": None, "remote": None, "tenant": "eval", "miss_policy": "fill-first"}
    summaries = []
    with ExitStack() as engines:
        with console.status(f"loading {model}"):
            first = engines.enter_context(LLM(model, enable_chunk_cache=True, **own, **given[0]))
            # All share one copy of the weights.
            llms = [first]
            for each in given[1:]:
                other = LLM(first.model, first.tokenizer, enable_chunk_cache=True, **own, **each)
                llms.append(engines.enter_context(other))
            plans = [make_plan(llm, examples, cells, max_answer, chunk_sources) for llm in llms]
        folder = output or Path(platformdirs.user_cache_dir("kvmosaic")) / "eval"
        with interruptible(), progress_bar(len(llms) * len(examples)) as steps:
            for llm, plan in zip(llms, plans, strict=True):
                config = llm.config
                sink = config.sink_prefix
                sink = Path(sink).name if sink.startswith("learned:") else sink
                steps.start(f"examples, entries {config.entry_dtype}, sink prefix {sink}"[:60])
                own_folder = folder if output and len(llms) == 1 else folder / plan.digest
                with WorkFile(own_folder, plan.digest) as work:
                    evaluate(llm, plan, work, lambda _: steps.done())
                settings = config.sink_prefix, seed, config.entry_dtype
                summaries.append(summarise(work.scores, plan.cells, len(examples), *settings))
    summary = Summary.joined(summaries)
    title = f"{model} on {data}, {len(examples)} examples" + (", chunks found" if chunk_sources == AUTO else "")
    advice = sentence(summary)
    _show(title, summary, json)
    print_line(f"\n{advice}", json)
    results = str(work.path if len(summaries) == 1 else folder)
    print_line(f"\nresults of single examples: {results}", json)
    if html is not None:
        html.write_text(render(title, summary), encoding="utf-8")
        print_line(f"report: {html}", json)
    if json:
        about = {"model": model, "data": data, "seed": seed, "max_answer": max_answer, "results": results}
        about["chunk_sources"] = chunk_sources
        print_json({**about, "advice": advice, **summary.as_dict()})


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C into a line that says that finished work is kept, and the exit status of an interrupt signal."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("interrupted; finished work is kept, and the same command continues from there", style="yellow")
        raise typer.Exit(130) from None


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before hours of work."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: must be a file in a folder that exists")
    new = not path.exists()
    try:
        path.open("ab").close()  # checking permissions is not enough: root has them everywhere
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}); choose another file") from None


def check_folder(path: Path | None) -> None:
    """Create the folder of ``--output``, or refuse it."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot create this folder ({error.strerror}); choose another") from None


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ratios {text}: must be numbers with commas between them, like 0.05,0.15") from None


def _show(title: str, summary: "Summary", json: bool) -> None:
    print_table(
        f"{title}; KL and F1 with 95 % intervals",
        (
            *(
                "policy",
                "sink prefix",
                "entries",
                "ratio",
                "charged",
                "KL",
                "KL p95",
                "top-1",
                "EM",
                "F1",
                "gap closed",
                "ms",
            ),
            "KL against random",
        ),
        (
            (
                row.policy,
                line.sink_prefix.rpartition("/")[2][:40],
                line.entry_dtype,
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
