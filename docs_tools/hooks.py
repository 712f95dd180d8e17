"""What MkDocs runs while it builds the site: adds pages that are not files in docs/."""

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # MkDocs loads this file by its path, outside of its package

from docs_tools.reference import pages  # noqa: E402

ROOT_PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "deploy/README.md": "deploy.md",
}
"""Texts that stay outside of ``docs/``, where people and tools look for them, and their place in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages and the texts outside of ``docs/``."""
    generated = pages() | {page: _root_text(name) for name, page in ROOT_PAGES.items()}
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace ``<!-- README: Heading -->`` by that section of the README."""
    return re.sub(r"<!-- README: (.*) -->", lambda mark: _section(mark[1]), markdown)


def _section(heading: str) -> str:
    section = rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)"
    found = re.search(section, _root_text("README.md"), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no section {heading!r}, which a page of the site includes")
    return found[1].strip()


def _root_text(name: str) -> str:
    """A text outside of ``docs/``, with links as seen from there."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](").replace("](../docs/", "](")
    for other, page in ROOT_PAGES.items():
        text = text.replace(f"]({other})", f"]({page})").replace(f"](../{other})", f"]({page})")
    return text
