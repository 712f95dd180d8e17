"""CI's workflows call targets that exist, and leave no test out."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKES = re.compile(r"^(?:\w+=\S+ )*make ([\w-]+)$", re.MULTILINE)


def targets(workflow):
    """Targets of make that the steps of a workflow call, also through the script of CI."""
    steps = [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job["steps"]]
    lines = "\n".join(step.get("run", "") for step in steps)
    return MAKES.findall(lines.replace(".ci/run", "make test"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_targets_exist(workflow):
    assert targets(workflow)
    for target in targets(workflow):
        subprocess.run(["make", target, "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_all_tests_are_run():
    called = {path.stem: targets(path) for path in WORKFLOWS}
    assert called == {"ci": ["check", "test"], "nightly": ["test-all"]}
    assert "make test" in (ROOT / ".ci" / "run").read_text()
