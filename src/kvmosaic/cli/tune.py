"""``kvmosaic tune``: learn what chunks are computed after, for one model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmosaic.cli.corpus import read_corpus
from kvmosaic.cli.eval import check_file, interruptible
from kvmosaic.cli.output import JsonOption, console, print_json, print_line, progress_bar
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.profile import Profile, profile_name, profile_path, read_profile, sink_path, write_profile
from kvmosaic.core.sink import LEARNED

if TYPE_CHECKING:  # importing it for real takes seconds
    from kvmosaic.eval.base import Example

MEASURED = ("measured", "targets", "data", "seed", "kvmosaic")
"""Parts of a profile that say how its settings were found."""
TOKENS = 64
"""Default length of a sink. Twice as many tokens were no better (docs/quality.md)."""
MAX_EXAMPLES = 4000
"""Maximum examples of a file that are learned from."""


def tune(
    model: Annotated[str, typer.Argument(help="Catalog name, folder or hub name.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of documents (text, JSONL) or of examples, as for eval; may be repeated."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Minutes to train, at most.")] = 15.0,
    steps: Annotated[int, typer.Option(help="Steps to train, at most.")] = 2500,
    tokens: Annotated[int, typer.Option(help="Tokens of the sink.")] = TOKENS,
    seed: Annotated[int, typer.Option(help="Chooses the lessons.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File to write; default: beside the model's profile.")] = None,
    json: JsonOption = False,
) -> None:
    """Learn a sink prefix from documents, so that reused chunks answer more like a full prefill. Engines find it by
    the model's profile. Interrupted and started again, it goes on where it stopped."""
    from kvmosaic.hf import LLM  # here, because importing them takes seconds
    from kvmosaic.tune.material import Material
    from kvmosaic.tune.train import Progress, Recipe
    from kvmosaic.tune.tune import tune

    # Everything that can be wrong is looked at before the model is loaded.
    for name, value in (("--minutes", minutes), ("--steps", steps)):
        if not value > 0:
            raise ConfigError(f"{name} {value}: must be more than 0")
    path = (output or sink_path(model)).absolute()
    check_file("--output", output)
    if tokens < 2:
        raise ConfigError(f"--tokens {tokens}: must be at least 2")
    material = Material.of(*_read(data or []), seed)
    with console.status(f"loading {model}"):
        own: dict[str, Any] = {"disk_path": None, "remote": None, "chunk_context": "alone", "chunk_separator": None}
        plain: dict[str, Any] = {"sink_prefix": "document", "policy": "composite", "recompute_ratio": 0.0}
        llm = LLM(model, enable_chunk_cache=True, **own, **plain)
    make = Recipe.for_cpu if llm.model.device.type == "cpu" else Recipe
    recipe = make(minutes=minutes, steps=steps, seed=seed)
    with llm, interruptible(), progress_bar(100) as bar:
        bar.start("held-out prompts with the text")

        def show(progress: Progress) -> None:
            held_out = "-" if progress.held_out_kl is None else f"{progress.held_out_kl:.4f}"
            bar.start(f"step {progress.step}: KL {progress.train_kl:.4f}, held out {held_out}")
            bar.reach(int(100 * progress.share))

        tuned = tune(llm, material, [each.name for each in data or []], recipe, tokens, path, show)
    if output is None:
        _use(model, path)
    about = {"kl_before": tuned.kl_before, "kl_after": tuned.kl_after, "steps": tuned.steps, "sink": str(path)}
    print_line(
        f"held-out KL at ratio 0: {tuned.kl_before:.4f} with the text, {tuned.kl_after:.4f} with the learned sink\n"
        f"sink: {path}\nuse it with sink_prefix={LEARNED}{path}" + ("" if output else ", which the profile now says"),
        json,
    )
    if json:
        print_json({"model": model, **about})


def _read(paths: list[Path]) -> tuple[list[str], list["Example"], list["Example"]]:
    """Documents, and examples with questions, by what the files are: those to learn from, and those held out."""
    from kvmosaic.eval.data import is_examples, load
    from kvmosaic.tune.material import is_held_out

    documents: list[str] = []
    learned: list[Example] = []
    judged: list[Example] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--data {path}: there is no such file")
        if path.is_file() and is_examples(path):
            learned += load(str(path), MAX_EXAMPLES, 0, keep=lambda text: not is_held_out(text))
            judged += load(str(path), MAX_EXAMPLES, 0, keep=is_held_out)
        else:
            documents += [document.text for document in read_corpus([path], None)]
    return documents, learned, judged


def _use(model: str, path: Path) -> None:
    """Have engines find the sink by the model's profile, whose other settings stay."""
    known = read_profile(profile_path(model))
    setting = f"{LEARNED}{path}"
    if known is None:
        known = Profile(model=profile_name(model), policy="composite", recompute_ratio=0.0, sink_prefix=setting)
    write_profile(known.model_copy(update={"sink_prefix": setting, **dict.fromkeys(MEASURED)}), profile_path(model))
