"""The built wheel, installed into an environment without this checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import kvmosaic

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def run(*command, cwd, timeout=300, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, **options
    )


def build(checkout, folder):
    built = run(*PIP, "wheel", "--no-deps", "--wheel-dir", folder, checkout, cwd=folder)
    assert built.returncode == 0, built.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    """Commands of an environment with the wheel. Its requirements are those of the environment that runs the tests,
    behind its own packages: downloading torch again would take minutes. Links to this checkout are not included,
    because Python follows them only in an environment's own folder."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT).returncode == 0
    installed = run(*PIP, "--python", folder / "bin" / "python", "install", "--no-deps", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def metadata(wheel):
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def links(text):
    return re.findall(r"\]\(([^)]*)\)", text)


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"kvmosaic", f"kvmosaic-{kvmosaic.__version__}.dist-info"}
    data = {"kvmosaic/engines/vllm/telemetry/dashboard.json", "kvmosaic/engines/mosaic/page.html"}
    assert {"kvmosaic/py.typed", *data} <= set(names)


def test_the_version_comes_from_one_place(wheel, bin_folder, tmp_path):
    assert metadata(wheel)["Version"] == kvmosaic.__version__
    assert run(bin_folder / "kvmosaic", "--version", cwd=tmp_path).stdout == f"kvmosaic {kvmosaic.__version__}\n"


def test_the_package_page_has_no_link_that_needs_the_repository(wheel):
    page = metadata(wheel).get_payload()
    assert page.startswith("# kvmosaic\n")
    assert all(target.startswith("https://") for target in links(page))
    assert "![" not in page


def test_links_of_the_package_page_are_absolute_if_the_repository_has_an_address(tmp_path):
    for name in ("LICENSE", "README.md", "hatch_build.py", "src/kvmosaic/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    project = re.sub(r"\n\[project.urls\].*?\n\n", "\n", (ROOT / "pyproject.toml").read_text(), flags=re.DOTALL)
    address = '\n[project.urls]\nSource = "https://example.org/kvmosaic"\n\n[project.scripts]\n'
    (tmp_path / "pyproject.toml").write_text(project.replace("\n[project.scripts]\n", address))
    targets = links(metadata(build(tmp_path, tmp_path)).get_payload())
    assert "https://example.org/kvmosaic/blob/main/docs/usage.md" in targets
    assert "https://example.org/kvmosaic/raw/main/docs/figures/first-token.svg" in targets
    assert len(targets) == len(links((ROOT / "README.md").read_text()))


def test_the_package_is_that_of_the_wheel(bin_folder, tmp_path):
    code = "import kvmosaic; print(kvmosaic.__file__)"
    found = run(bin_folder / "python", "-c", code, cwd=tmp_path).stdout
    assert Path(found).is_relative_to(bin_folder.parent)


def test_help(bin_folder, tmp_path):
    shown = run(bin_folder / "kvmosaic", "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "serve" in shown.stdout


def test_doctor(bin_folder, tmp_path):
    checked = run(bin_folder / "kvmosaic", "doctor", "--json", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["ok"]


def test_dashboard(bin_folder, tmp_path):
    printed = run(bin_folder / "kvmosaic", "dashboard", cwd=tmp_path).stdout
    assert printed == (ROOT / "src/kvmosaic/engines/vllm/telemetry/dashboard.json").read_text()
    assert json.loads(printed)["title"] == "kvmosaic"
