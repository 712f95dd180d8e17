"""The settings of a reader of the documentation: the defaults, and the profiles that come with the package."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmosaic.core.setting import all_settings


@contextmanager
def readers_defaults(folder: Path) -> Iterator[None]:
    """Take back the settings that tests choose, in this process and in those that it starts. ``folder`` is the
    reader's folder of configurations, where profiles are written."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("KVMOSAIC_PROFILES_DIR", *(setting.variable for setting in all_settings())):
            patch.delenv(name, raising=False)
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        yield
