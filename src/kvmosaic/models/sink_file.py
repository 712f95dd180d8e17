"""Saves and loads files of learned sinks."""

import json
import os
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvmosaic.core.errors import ConfigError, KvmosaicError
from kvmosaic.core.learned_sink import LearnedSink, SinkAbout

FORMAT = "1"
"""Version of the format of sink files."""
_FORMAT_KEY, _ABOUT_KEY = "kvmosaic_sink_format", "about"


def save_sink(sink: LearnedSink, path: Path) -> None:
    """Write a sink to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    tensors = {"k": sink.k.contiguous(), "v": sink.v.contiguous(), "witness": sink.witness.contiguous()}
    try:
        save_file(tensors, scratch, {_FORMAT_KEY: FORMAT, _ABOUT_KEY: sink.about.model_dump_json()})
        scratch.replace(path)
    except SafetensorError as error:  # a full disk, for example
        raise KvmosaicError(f"cannot write {path}: {' '.join(str(error).split())[:200]}") from None
    finally:
        scratch.unlink(missing_ok=True)


def load_sink(path: str | Path) -> LearnedSink:
    """The sink in a file."""
    place = Path(path).expanduser()
    try:
        with safe_open(place, framework="pt") as file:
            about = file.metadata() or {}
            if about.get(_FORMAT_KEY) != FORMAT:
                raise ConfigError(f"{path}: not a sink of format {FORMAT}; make one with `kvmosaic tune`")
            # Cloned, because the file is mapped and may be replaced while an engine runs.
            k, v, witness = (file.get_tensor(name).clone() for name in ("k", "v", "witness"))
        return LearnedSink(k, v, witness, SinkAbout.model_validate(json.loads(about[_ABOUT_KEY])))
    except FileNotFoundError:
        raise ConfigError(f"there is no sink at {path}; `kvmosaic tune` makes one") from None
    except ConfigError:
        raise
    except (OSError, SafetensorError, ValidationError, KeyError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: not a sink ({line}); make one with `kvmosaic tune`") from None
