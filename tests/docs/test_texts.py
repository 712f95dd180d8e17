"""Texts that both GitHub and MkDocs show as they are meant."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ITEM = re.compile(r"([-*]|\d+\.) ")


def lists_without_blank_line(text):
    is_code, before = False, ""
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if ITEM.match(line) and not is_code and before and not ITEM.match(before) and not before.startswith(" "):
            yield line
        before = line


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_list_has_a_blank_line_before_it(path):
    """Without a blank line, MkDocs makes it a paragraph."""
    assert not list(lists_without_blank_line(path.read_text()))
