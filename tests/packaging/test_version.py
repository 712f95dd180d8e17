"""The version, and the changelog's."""

import re
from pathlib import Path

from packaging.version import Version

import kvmosaic

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def test_the_version_is_a_release_or_comes_before_the_next_one():
    """Reports of problems name the version, so what is not released must not have the name of a release."""
    newest, *released = re.findall(r"^## (\S+)", CHANGELOG.read_text(), re.MULTILINE)
    version = Version(kvmosaic.__version__)
    if newest == "Unreleased":
        assert version.is_devrelease
        assert version > Version(released[0])
    else:
        assert str(version) == newest
