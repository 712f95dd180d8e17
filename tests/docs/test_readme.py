"""The README stays short."""

import re

import pytest

from tests.docs.blocks import ROOT

README = (ROOT / "README.md").read_text()


def support_matrix():
    """Rows of the table below "What works", without its head."""
    section = README.split("\n## What works\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")][2:]


def test_it_has_at_most_120_lines():
    assert len(README.splitlines()) <= 120


def test_the_support_matrix_has_at_most_ten_rows():
    assert 1 <= len(support_matrix()) <= 10


@pytest.mark.parametrize("row", support_matrix())
def test_rows_of_the_support_matrix_are_short(row):
    """At most 150 characters, without the addresses of links."""
    assert len(re.sub(r"\]\([^)]*\)", "]", row)) <= 150
