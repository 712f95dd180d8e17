"""Reference pages have everything that the code has."""

import re

import pytest

from docs_tools.commands import commands
from docs_tools.docstrings import attribute_docstrings
from docs_tools.reference import pages
from kvmosaic.core.config import CLIENT_PARAMETERS, SECRETS, ChunkCacheConfig
from kvmosaic.engines.results import Fallback
from kvmosaic.engines.vllm.parameters import RequestParameters
from kvmosaic.engines.vllm.telemetry.series import COUNTS, LEVELS
from tests.docs.blocks import TEXTS

PAGES = pages()


def headings(page):
    return re.findall(r"^## `(.*)`$", PAGES[page], re.MULTILINE)


def first_cells(page):
    return re.findall(r"^\| `([^`]*)` \|", PAGES[page], re.MULTILINE)


def test_settings():
    assert headings("reference/settings.md") == list(ChunkCacheConfig.model_fields)
    text = PAGES["reference/settings.md"]
    assert all(secret in text for secret in SECRETS)
    assert "| default | `2GiB` |" in text
    assert "| type | background or fill-first or never |" in text
    assert "| option | `--self-test` `--no-self-test` |" in text
    assert "| environment | `KVMOSAIC_TENANT` |" in text


def test_commands():
    names = headings("reference/cli.md")
    assert {"kvmosaic serve", "kvmosaic doctor", "kvmosaic store ls", "kvmosaic bench ttft"} <= set(names)
    assert len(names) == len(set(names))
    for name, command in commands():
        section = PAGES["reference/cli.md"].split(f"## `{name}`\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `([^`]*)` \|", section, re.MULTILINE)
        assert len(rows) == len(command.params)
        options = [row.split(" <")[0].split(" / ") for row in rows if row.startswith("--")]
        expected = [[*each.opts, *each.secondary_opts] for each in command.params if each.param_type_name == "option"]
        assert options == expected


def test_parameters():
    cells = first_cells("reference/parameters.md")
    assert cells == [*CLIENT_PARAMETERS, *(reason.value for reason in Fallback)]


def test_metrics():
    cells = first_cells("reference/metrics.md")
    counters = [f"kvmosaic:{name}_total" for name in COUNTS]
    assert cells == [*counters, *(f"kvmosaic:{name}" for name in LEVELS), "kvmosaic:stage_seconds"]


def test_metrics_that_texts_name():
    known = {*first_cells("reference/metrics.md")}
    found = {name for path in TEXTS for name in re.findall(r"\bkvmosaic:[a-z_]{3,}", path.read_text())}
    assert found
    assert found <= known


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_whole(page):
    """Bars are allowed in code, and nowhere else inside a cell."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE)
    assert tables
    for table in tables:
        bars = {re.sub(r"`[^`]*`", "", row).count("|") for row in table.splitlines()}
        assert len(bars) == 1, table


@pytest.mark.parametrize("documented", [RequestParameters, Fallback])
def test_docstrings_are_those_below_attributes(documented):
    docstrings = attribute_docstrings(documented)
    assert all(text.strip().endswith(".") for text in docstrings.values())
    if documented is Fallback:
        assert set(docstrings) == set(Fallback.__members__)
