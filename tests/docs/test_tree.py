"""docs/structures.md has every file of the package, and no others."""

import os
import re
import shutil
import subprocess
from pathlib import PurePosixPath

import pytest

from tests.docs.blocks import ROOT, block

TREE = block("docs/structures.md: src/kvmosaic/").code
FOLDER = re.compile(r"^( *)([\w/]+/)(?: |$)")
NAME = re.compile(r"(?<![\w/.])(?:\.\./)?[\w/]+\.(?:py|html|json|ya?ml|md)\b")
AS_A_WHOLE = "one file per"
"""Words that describe all files of a folder. A folder without any file names is described as a whole as well."""


def entries():
    """Each folder of the tree, with the lines that describe its own files."""
    folders, stack = {}, []
    for line in TREE.splitlines():
        indent = len(line) - len(line.lstrip())
        stack = [(depth, folder) for depth, folder in stack if depth < indent]
        parent = stack[-1][1] if stack else PurePosixPath()
        if found := FOLDER.match(line):
            parent = parent / found[2]
            stack.append((indent, parent))
            line = line[found.end() :]
        folders.setdefault(parent, []).append(line)
    return folders


def named():
    """Paths of the files that the tree names: those of the folder that they are listed in, or of the root."""
    for folder, lines in entries().items():
        for name in NAME.findall("\n".join(lines)):
            path = os.path.normpath(folder / name)
            yield path if (ROOT / path).exists() else name


def whole():
    """Folders whose files need no names."""
    texts = {folder: "\n".join(lines) for folder, lines in entries().items()}
    return [str(folder) for folder, text in texts.items() if AS_A_WHOLE in text or not NAME.search(text)]


def is_described_as_a_whole(path):
    """By the nearest folder that the tree has."""
    nearest = next(folder for folder in PurePosixPath(path).parents if folder in entries())
    return str(nearest) in whole()


@pytest.mark.parametrize("path", sorted({*named()}))
def test_files_of_the_tree_exist(path):
    assert (ROOT / path).exists()


def test_files_of_the_package_are_in_the_tree():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("without git, files of the package cannot be told from others")
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [path for path in listed.stdout.split() if not path.endswith(("/__init__.py", "/py.typed"))]
    assert len(files) > 100
    known = {*named()}
    assert [path for path in files if path not in known and not is_described_as_a_whole(path)] == []


def test_few_folders_are_described_as_a_whole():
    folders = {folder for folder in whole() if folder.startswith("src")}
    assert folders == {f"src/kvmosaic/{name}" for name in ("cli", "engines/vllm/compat", "profiles")}


def test_the_tree_has_no_links():
    """A code block shows their source."""
    assert "](" not in TREE
