"""Commits that the documentation names exist, so that readers can repeat a measurement."""

import re
import shutil
import subprocess

import pytest

from tests.docs.blocks import ROOT

ABBREVIATED = re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7}\b")
"""Seven hexadecimal digits with a letter and a numeral: no number, and no word."""
TEXTS = sorted(
    path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.*")] if path.suffix in (".md", ".json")
)


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


@pytest.fixture(scope="module")
def commits():
    """All commits of this history, each by its first seven digits."""
    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("without git, or in a shallow clone, commits cannot be looked up")
    return {name[:7] for name in git("rev-list", "HEAD")}


def test_ids_are_recognised():
    assert ABBREVIATED.findall("(30346c8, 1234567; defaced, d0cument, docs/30346c8.md, `8a5789b`)") == [
        *("30346c8", "30346c8", "8a5789b")
    ]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_commits_exist(commits, path):
    assert set(ABBREVIATED.findall(path.read_text())) <= commits
