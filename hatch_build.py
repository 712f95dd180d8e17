"""Makes the text of the package page from the README, whose links lead into the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)]*)\)")


class PackagePage(MetadataHookInterface):
    """Sets the project's readme: the package index shows it far from the files that it links to."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": package_page(text, source)}


def package_page(readme: str, source: str | None) -> str:
    """``readme`` with links that work everywhere: to the repository at ``source``, or none if it has no address."""

    def everywhere(link: re.Match[str]) -> str:
        label, target = link.groups()
        if source:
            return f"[{label}]({source}/blob/main/{target})"
        return label if label == target else f"{label} ({target})"

    return RELATIVE_LINK.sub(everywhere, readme)
