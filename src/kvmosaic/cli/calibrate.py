"""``kvmosaic calibrate``: find the cheapest settings that are good enough for a model, and keep them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import platformdirs
import typer

from kvmosaic.cli.eval import BETWEEN_POLICIES, check_file, check_folder, interruptible, numbers
from kvmosaic.cli.output import JsonOption, console, print_json, print_line, print_table, progress_bar
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.profile import profile_path, write_profile

if TYPE_CHECKING:  # importing it for real takes seconds
    from kvmosaic.eval.base import Cell, Example
    from kvmosaic.eval.calibrate import Candidate


def calibrate(
    model: Annotated[str, typer.Argument(help="Catalog name, folder or hub name.")],
    data: Annotated[str, typer.Option(help="File of examples, plain or .gz; or synthetic.")] = "synthetic",
    max_kl: Annotated[float, typer.Option(help="Mean KL to a full prefill, at most.")] = 0.05,
    min_top1: Annotated[float, typer.Option(help="Share of most likely tokens that agree, at least.")] = 0.9,
    policies: Annotated[str, typer.Option(help="To choose from.")] = "composite,sink-link",
    ratios: Annotated[str, typer.Option(help="To choose from; 0 always is.")] = "0.02,0.05,0.1,0.15,0.3",
    sink_prefixes: Annotated[
        str, typer.Option(help="To choose from: bos, none, document, learned:FILE, a text without commas.")
    ] = "bos,none,document",
    limit: Annotated[int, typer.Option(help="Examples, at most.")] = 25,
    seed: Annotated[int, typer.Option(help="Chooses examples and distractors.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for results; default: one in the user's cache.")] = None,
    profile: Annotated[Path | None, typer.Option(help="File to write; default: where engines look for it.")] = None,
    json: JsonOption = False,
) -> None:
    """Choose policy, ratio and sink prefix for a model. Exit status 1 if nothing meets the target. Interrupted and
    started again, it goes on where it stopped."""
    from kvmosaic.eval.calibrate import Target, advice, candidate_cells, cheapest, closest, profile_of
    from kvmosaic.eval.data import load  # here, because importing them takes seconds

    # Everything that can be wrong is looked at before the model is loaded.
    target = Target(max_kl, min_top1)
    target.check()
    chosen_policies = [part.strip() for part in BETWEEN_POLICIES.split(policies)]
    cells = candidate_cells(chosen_policies, numbers(ratios))
    sinks = list(dict.fromkeys(part.strip() for part in sink_prefixes.split(",")))
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
        write_profile(profile_of(model, chosen, target, chosen_policies, data, seed), path)
        print_line(f"\nchosen: {chosen}\nprofile: {path}", json)
    if json:
        about = {"model": model, "data": data, "seed": seed, "targets": target._asdict(), "profile": path}
        choice = None if chosen is None else chosen.as_dict()
        print_json({**about, "chosen": choice, "rows": [candidate.as_dict() for candidate in found]})
    if chosen is None:
        raise typer.Exit(1)


def _measure(
    model: str, sinks: Sequence[str], examples: Sequence["Example"], cells: Sequence["Cell"], folder: Path
) -> list["Candidate"]:
    """All cells with every sink prefix, on one copy of the weights."""
    from kvmosaic.eval.calibrate import measure
    from kvmosaic.hf import LLM

    with console.status(f"loading {model}"):
        loaded = LLM(model, enable_chunk_cache=False)
    found = []
    with interruptible(), progress_bar(len(sinks) * len(examples)) as steps:
        for sink in sinks:
            steps.start(f"examples, sink prefix {sink}")
            # A store of its own: nothing of the user's is read or cleared. A chunk that does not stay in it is filled
            # again; as ordinary text it would count as perfect. And an older profile, which may be why this is run,
            # is not looked at when its settings are given.
            own: dict[str, Any] = {"disk_path": None, "remote": None, "tenant": "eval", "miss_policy": "fill-first"}
            given: dict[str, Any] = {"sink_prefix": sink, "policy": "composite", "recompute_ratio": 0.0}
            with LLM(loaded.model, loaded.tokenizer, enable_chunk_cache=True, **own, **given) as llm:
                found += measure(llm, examples, cells, folder, lambda _: steps.done())
    return found
