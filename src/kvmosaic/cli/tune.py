"""``kvmosaic tune``: learn a sink prefix, after which chunks are computed, for one model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmosaic.cli.corpus import read_corpus
from kvmosaic.cli.eval import check_file, interruptible
from kvmosaic.cli.output import JsonOption, console, print_json, print_line, progress_bar
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.profile import Profile, profile_name, profile_path, read_profile, sink_path, write_profile
from kvmosaic.core.sink import LEARNED

if TYPE_CHECKING:  # importing it for real takes seconds
    from kvmosaic.eval.base import Example

MEASURED = ("measured", "targets", "data", "seed", "kvmosaic")
"""Fields of a profile that say how its settings were found."""
TOKENS = 64
"""Default length of a sink, in tokens. Twice as many were no better (docs/quality.md)."""
MAX_EXAMPLES = 4000
"""Maximum number of examples of a file that are learned from, and that are held out."""


def tune(
    model: Annotated[
        str,
        typer.Argument(
            help="Model to tune for: a catalog name (see `kvmosaic models ls`), a folder, or a Hugging Face name "
            "like owner/name."
        ),
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Training data: a file or folder of documents (text or JSONL), or a file of examples as for "
            "`kvmosaic eval`; may be repeated. Default: made-up texts."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Maximum training time, in minutes.")] = 15.0,
    steps: Annotated[int, typer.Option(help="Maximum number of training steps.")] = 2500,
    tokens: Annotated[int, typer.Option(help="Length of the learned sink prefix, in tokens.")] = TOKENS,
    seed: Annotated[int, typer.Option(help="Random seed that chooses the training prompts.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for the learned sink prefix. Default: next to the model's profile, which is changed to use it."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Learn a sink prefix from documents, so that answers from reused chunks come closer to a full prefill. Without
    --output, engines use the learned prefix through the model's profile. An interrupted run continues where it
    stopped when it is started again."""
    from kvmosaic.hf import LLM  # here, because importing them takes seconds
    from kvmosaic.tune.material import Material
    from kvmosaic.tune.train import Progress, Recipe
    from kvmosaic.tune.tune import tune

    # All options are checked before the model is loaded.
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
        bar.start("measuring the default text on held-out prompts")

        def show(progress: Progress) -> None:
            held_out = "-" if progress.held_out_kl is None else f"{progress.held_out_kl:.4f}"
            bar.start(f"step {progress.step}: KL {progress.train_kl:.4f}, held out {held_out}")
            bar.reach(int(100 * progress.share))

        tuned = tune(llm, material, [each.name for each in data or []], recipe, tokens, path, show)
    if output is None:
        _use(model, path)
    about = {"kl_before": tuned.kl_before, "kl_after": tuned.kl_after, "steps": tuned.steps, "sink": str(path)}
    print_line(
        f"held-out KL at ratio 0: {tuned.kl_before:.4f} with the default text, {tuned.kl_after:.4f} with the learned "
        f"sink\nsink: {path}\nuse it with sink_prefix={LEARNED}{path}"
        + ("" if output else "; the model's profile now sets this"),
        json,
    )
    if json:
        print_json({"model": model, **about})


def _read(paths: list[Path]) -> tuple[list[str], list["Example"], list["Example"]]:
    """Documents, examples to learn from, and held-out examples. The content of a file decides which it has."""
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
    return documents, _usable(learned), _usable(judged)


def _usable(examples: list["Example"]) -> list["Example"]:
    """The examples without an empty document, of which nothing could be asked."""
    return [example for example in examples if all(text.strip() for text in example.chunks)]


def _use(model: str, path: Path) -> None:
    """Set the sink in the model's profile, where engines find it. The profile's other settings stay."""
    known = read_profile(profile_path(model))
    setting = f"{LEARNED}{path}"
    if known is None:
        fields = ChunkCacheConfig.model_fields
        usual = {name: fields[name].default for name in ("policy", "recompute_ratio")}
        known = Profile(model=profile_name(model), sink_prefix=setting, **usual)
    write_profile(known.model_copy(update={"sink_prefix": setting, **dict.fromkeys(MEASURED)}), profile_path(model))
