"""``kvmosaic calibrate``: find the cheapest settings that are good enough for a model, and keep them."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import platformdirs
import typer

from kvmosaic.cli.eval import BETWEEN_POLICIES, check_file, check_folder, interruptible, numbers
from kvmosaic.cli.output import JsonOption, console, print_json, print_line, print_table, progress_bar
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.profile import is_shipped, load_profile, profile_path, shipped_profile, sink_path, write_profile
from kvmosaic.core.sink import LEARNED

if TYPE_CHECKING:  # importing it for real takes seconds
    from kvmosaic.eval.base import Cell, Example
    from kvmosaic.eval.calibrate import Candidate


def calibrate(
    model: Annotated[
        str,
        typer.Argument(
            help="Model to calibrate: a catalog name (see `kvmosaic models ls`), a folder, or a Hugging Face name "
            "like owner/name."
        ),
    ],
    data: Annotated[
        str, typer.Option(help="File of examples (plain or .gz), or synthetic for built-in examples.")
    ] = "synthetic",
    max_kl: Annotated[
        float, typer.Option(help="Target: maximum mean KL divergence from a full prefill, in nats.")
    ] = 0.05,
    min_top1: Annotated[
        float,
        typer.Option(
            help="Target: minimum share of answer tokens whose most likely token is the same as in a full prefill."
        ),
    ] = 0.9,
    policies: Annotated[
        str,
        typer.Option(help="Candidate policies (rules that choose which tokens to recompute), separated by commas."),
    ] = "composite,sink-link",
    ratios: Annotated[
        str,
        typer.Option(
            help="Candidate shares of document tokens to recompute, separated by commas; 0 is always included."
        ),
    ] = "0.02,0.05,0.1,0.15,0.3",
    sink_prefixes: Annotated[
        str | None,
        typer.Option(
            help="Candidate sink prefixes (texts that precede every chunk when its KV is computed), separated by "
            "commas: bos, none, document, learned:FILE, or a text without commas. Default: bos, none, document, and "
            "the model's learned sink if there is one."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of examples to measure.")] = 25,
    seed: Annotated[
        int, typer.Option(help="Random seed that chooses the examples, and the other documents in their prompts.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results of each example. Default: a folder in the user's cache."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Profile file to write. Default: the file in which engines look for the model's profile."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find the cheapest policy, recompute ratio and sink prefix that meet a quality target, and save them as the
    model's profile. Exit status 1 if nothing meets the target. An interrupted run continues where it stopped when it
    is started again."""
    from kvmosaic.eval.calibrate import Target, advice, candidate_cells, cheapest, closest, profile_of
    from kvmosaic.eval.data import load  # here, because importing them takes seconds

    # All options are checked before the model is loaded.
    target = Target(max_kl, min_top1)
    target.check()
    chosen_policies = [part.strip() for part in BETWEEN_POLICIES.split(policies)]
    cells = candidate_cells(chosen_policies, numbers(ratios))
    offered = _default_sinks(model) if sink_prefixes is None else [part.strip() for part in sink_prefixes.split(",")]
    sinks = list(dict.fromkeys(offered))
    if "" in sinks:
        raise ConfigError(f"--sink-prefixes {sink_prefixes!r}: one of them is empty; use none for no prefix")
    examples = load(data, limit, seed)
    check_file("--profile", profile)
    check_folder(output)
    folder = output or Path(platformdirs.user_cache_dir("kvmosaic")) / "eval"
    found = _measure(model, sinks, examples, cells, folder)

    chosen = cheapest(found, target)
    print_table(
        f"{target}; {len(examples)} examples",
        ("sink prefix", "policy", "ratio", "charged", "KL", "top-1", ""),
        (
            (
                candidate.sink_prefix,
                row.policy,
                f"{row.ratio:g}",
                row.charged_ratio,
                f"{row.kl_mean:.4f}",
                row.top1,
                "chosen" if candidate is chosen else "" if target.missed_by(row) else "ok",
            )
            for candidate in found
            for row in (candidate.row,)
        ),
        json=json,
    )
    path = None
    if chosen is None:
        best = closest(found, target)
        print_line(f"\nnothing meets {target}; closest: {best}; {advice(best, target)}", json)
    else:
        path = profile or profile_path(model)
        made = profile_of(model, chosen, target, chosen_policies, data, seed)
        write_profile(made.model_copy(update={"sink_prefix": _lasting(chosen.sink_prefix, model)}), path)
        print_line(f"\nchosen: {chosen}\nprofile: {path}", json)
    if json:
        about = {"model": model, "data": data, "seed": seed, "targets": target._asdict(), "profile": path}
        choice = None if chosen is None else chosen.as_dict()
        print_json({**about, "chosen": choice, "rows": [candidate.as_dict() for candidate in found]})
    if chosen is None:
        raise typer.Exit(1)


def _default_sinks(model: str) -> list[str]:
    """The sink prefixes that every model has, after the one that ``kvmosaic tune`` learned for this model, or that
    comes with the package: if that is refused, it is refused at once."""
    own = sink_path(model).absolute()
    learned = f"{LEARNED}{own}" if own.is_file() else load_profile(shipped_profile(model)).get("sink_prefix")
    return [*([learned] if learned else []), "bos", "none", "document"]


def _lasting(sink: str, model: str) -> str:
    """A sink prefix as a profile keeps it: with an absolute path outside the package, whose folder may change."""
    if not sink.startswith(LEARNED):
        return sink
    path = Path(sink.removeprefix(LEARNED)).expanduser().absolute()
    if is_shipped(sink):
        path = sink_path(model).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sink.removeprefix(LEARNED), path)
    return f"{LEARNED}{path}"


def _measure(
    model: str, sinks: Sequence[str], examples: Sequence["Example"], cells: Sequence["Cell"], folder: Path
) -> list["Candidate"]:
    """Measure all cells with every sink prefix, on one copy of the weights."""
    from kvmosaic.eval.calibrate import measure
    from kvmosaic.hf import LLM

    with console.status(f"loading {model}"):
        loaded = LLM(model, enable_chunk_cache=False)
    found = []
    with interruptible(), progress_bar(len(sinks) * len(examples)) as steps:
        for sink in sinks:
            steps.start(f"examples, sink prefix {sink}")
            # A separate store: the user's store is neither read nor cleared. With fill-first, an evicted chunk is
            # filled again; as ordinary text it would count as perfect reuse. When all of a profile's settings are
            # given, an older profile is not read; it may be the reason for this run.
            own: dict[str, Any] = {"disk_path": None, "remote": None, "tenant": "eval", "miss_policy": "fill-first"}
            given: dict[str, Any] = {"sink_prefix": sink, "policy": "composite", "recompute_ratio": 0.0}
            with LLM(loaded.model, loaded.tokenizer, enable_chunk_cache=True, **own, **given) as llm:
                found += measure(llm, examples, cells, folder, lambda _: steps.done())
    return found
