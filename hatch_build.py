"""Makes the text of the package page from the README, whose links lead into the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]*)\)")
"""A link or, behind ``!``, an image."""


class PackagePage(MetadataHookInterface):
    """Sets the project's readme: the package index shows it far from the files that it links to."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": package_page(text, source)}


def package_page(readme: str, source: str | None) -> str:
    """``readme`` with links and images that work everywhere: those of the repository at ``source``. If it has no
    address, links become text, and so do images, of which the description is left."""

    def everywhere(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        if source:
            return f"{mark}[{label}]({source}/{'raw' if mark else 'blob'}/main/{target})"
        return label if mark or label == target else f"{label} ({target})"

    return RELATIVE_LINK.sub(everywhere, readme)
