"""Files of learned sinks."""

import json
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.learned_sink import LearnedSink, SinkAbout

FORMAT = "1"
_FORMAT_KEY, _ABOUT_KEY = "kvmosaic_sink_format", "about"


def save_sink(sink: LearnedSink, path: Path) -> None:
    """Put it at ``path``, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    tensors = {"k": sink.k.contiguous(), "v": sink.v.contiguous(), "witness": sink.witness.contiguous()}
    try:
        save_file(tensors, scratch, {_FORMAT_KEY: FORMAT, _ABOUT_KEY: sink.about.model_dump_json()})
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def load_sink(path: str | Path) -> LearnedSink:
    """The sink in a file."""
    place = Path(path).expanduser()
    try:
        changed = place.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"no sink at {path} ({error.strerror}); `kvmosaic tune` makes one") from None
    return _load(place, changed)


@lru_cache(maxsize=4)
def _load(path: Path, changed: int) -> LearnedSink:
    """``changed``: when the file was, so that a new one is read."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get(_FORMAT_KEY) != FORMAT:
                raise ConfigError(f"{path}: not a sink of format {FORMAT}; make one with `kvmosaic tune`")
            k, v, witness = (file.get_tensor(name) for name in ("k", "v", "witness"))
        return LearnedSink(k, v, witness, SinkAbout.model_validate(json.loads(about[_ABOUT_KEY])))
    except (OSError, SafetensorError, ValidationError, KeyError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: not a sink ({line}); make one with `kvmosaic tune`") from None
