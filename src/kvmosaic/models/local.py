"""Pulls models to this machine and finds them."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.folders import models_dir
from kvmosaic.models.catalog import CATALOG
from kvmosaic.models.convert import convert
from kvmosaic.models.download import fetch_gguf

_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_ABANDONED_AFTER_S = 24 * 3600

_log = logging.getLogger(__name__)


def installed() -> dict[str, Path]:
    """The catalog models that are on this machine, with their folders."""
    return {name: models_dir() / name for name in CATALOG if _complete(models_dir() / name)}


def resolve(model: str) -> str:
    """The argument for a model loader. A catalog name becomes its folder; a folder or a hub name is unchanged."""
    if model in CATALOG:
        return str(pull(model))
    if "/" not in model and not Path(model).exists():
        raise KvmosaicError(
            f"no model {model!r}: it is neither a folder nor one of {', '.join(CATALOG)}; "
            "names on the hub have an owner, like owner/name"
        )
    return model


def pull(name: str, progress: Callable[[str], None] = _log.info) -> Path:
    """Make sure a catalog model is on this machine and return its Hugging Face folder."""
    if name not in CATALOG:
        raise KvmosaicError(f"Unknown model {name!r}; known models: {', '.join(CATALOG)}.")
    target = models_dir() / name
    if _complete(target):
        return target
    if missing := [module for module in ("transformers", "accelerate", "gguf") if find_spec(module) is None]:
        needed = ", ".join(missing)
        raise KvmosaicError(f"Converting {name} needs {needed}; in kvmosaic's folder, pip install -e '.[hf]'.")
    source = CATALOG[name]
    models_dir().mkdir(parents=True, exist_ok=True)
    _sweep()
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=models_dir()) as scratch:
        gguf, folder = Path(scratch, "model.gguf"), Path(scratch, "folder")
        progress(f"downloading {name} ({source.params / 1e6:.0f} M parameters, {source.licence})")
        fetch_gguf(name, source, gguf)
        progress(f"converting {name}")
        convert(gguf, folder)
        try:
            folder.rename(target)
        except OSError as error:
            # Another process that pulled at the same time may have been first. Its folder is equivalent.
            if not _complete(target):
                problem = f"Cannot put {name} at {target} ({error.strerror}); delete what is there."
                raise KvmosaicError(problem) from error
    progress(f"{name} is at {target}")
    return target


def _complete(folder: Path) -> bool:
    return all((folder / file).is_file() for file in _FILES)


def _sweep() -> None:
    """Delete the remains of killed pulls. Recent folders are kept, because their pull may still be running."""
    for leftover in models_dir().glob(".pull-*"):
        with suppress(FileNotFoundError):  # another process may be sweeping
            if time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(leftover, ignore_errors=True)
