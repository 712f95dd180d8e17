"""Folders of this user."""

import os
from pathlib import Path

import platformdirs


def models_dir() -> Path:
    """The folder of all pulled models. The environment variable KVMOSAIC_MODELS_DIR sets it."""
    chosen = os.environ.get("KVMOSAIC_MODELS_DIR")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("kvmosaic")) / "models"


def profiles_dir() -> Path:
    """The folder of the user's profiles. The environment variable KVMOSAIC_PROFILES_DIR sets it."""
    chosen = os.environ.get("KVMOSAIC_PROFILES_DIR")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_config_dir("kvmosaic")) / "profiles"
