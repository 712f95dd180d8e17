"""Profiles: files with the settings that ``kvmosaic calibrate`` or ``tune`` found for a model. Engines read them."""

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.folders import models_dir, profiles_dir
from kvmosaic.core.sink import LEARNED

PROFILE_SETTINGS = ("policy", "recompute_ratio", "sink_prefix")
"""The settings in a profile. Its other fields record how they were found."""

SHIPPED = Path(__file__).parent.parent / "profiles"
"""Folder of the profiles that come with the package, for models of the catalog."""

_HEADER = (
    "# Written by kvmosaic calibrate or tune: default settings for this model. All other settings override them.\n"
)


class Measured(BaseModel):
    """Quality that was measured with the settings."""

    kl_mean: float
    top1: float
    charged_ratio: float
    n: int


class Targets(BaseModel):
    """Targets that the settings had to meet."""

    max_kl: float
    min_top1: float


class Profile(BaseModel):
    """Settings for a model, and their origin. No field depends on the time of creation."""

    # Unknown keys are ignored: a later version may have added them.
    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str | None = None
    policy: str = Field(min_length=1)
    recompute_ratio: float = Field(ge=0.0, le=1.0, strict=True)
    sink_prefix: str
    measured: Measured | None = None
    targets: Targets | None = None
    data: str | None = None
    seed: int | None = None
    kvmosaic: str | None = None
    """Version of kvmosaic that wrote the profile."""


def profile_name(model: str) -> str:
    """The last part of a path or hub name: the same model has the same profile wherever its folder is."""
    return os.path.basename(os.path.abspath(model))


def profile_path(model: str) -> Path:
    """Path of the user's profile of ``model``."""
    return profiles_dir() / f"{profile_name(model)}.yaml"


def sink_path(model: str) -> Path:
    """Default path of the sink that ``kvmosaic tune`` learns for ``model``: beside its profile."""
    return profile_path(model).with_suffix(".sink.safetensors")


def shipped_profile(model: str) -> Path | None:
    """The profile that comes with the package, if ``model`` is a model of the catalog: its name, or its folder. Other
    models may have the same name and other weights. There is none if KVMOSAIC_PROFILES_DIR is set."""
    name = profile_name(model)
    is_pulled = model == name or Path(model).resolve() == (models_dir() / name).resolve()
    path = SHIPPED / f"{name}.yaml"
    return path if is_pulled and path.exists() and not os.environ.get("KVMOSAIC_PROFILES_DIR") else None


def find_profile(model: str) -> Path | None:
    """The file with the profile of ``model``: the user's, or else the one that comes with the package."""
    path = profile_path(model)
    return path if os.path.lexists(path) else shipped_profile(model)


def load_profile(path: Path | None) -> dict[str, Any]:
    """The settings in a profile; none when there is no such file. The path of a learned sink may be relative to the
    profile's folder."""
    profile = None if path is None else read_profile(path)
    if path is None or profile is None:
        return {}
    settings = {name: getattr(profile, name) for name in PROFILE_SETTINGS}
    if profile.sink_prefix.startswith(LEARNED):
        sink = Path(profile.sink_prefix.removeprefix(LEARNED)).expanduser()
        settings["sink_prefix"] = f"{LEARNED}{path.parent / sink}"
    return settings


def is_shipped(sink_prefix: str) -> bool:
    """Whether a setting names a learned sink that comes with the package."""
    return sink_prefix.startswith(LEARNED) and Path(sink_prefix.removeprefix(LEARNED)).parent == SHIPPED


def read_profile(path: Path) -> Profile | None:
    """The profile in a file; ``None`` when there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise broken(path, str(error)) from None
    try:
        return Profile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise broken(path, str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise broken(path, f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from None


def broken(path: Path, reason: str) -> ConfigError:
    """The error for a profile that cannot be used."""
    line = " ".join(reason.split())
    return ConfigError(f"profile {path}: {line}; delete the file or run kvmosaic calibrate again")


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile to ``path`` atomically: an engine may be starting and reading it."""
    text = yaml.safe_dump(profile.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(_HEADER + text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
