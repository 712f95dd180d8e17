"""Deployment files: linters accept them, and their settings and options exist."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvmosaic.core.admin_key import ADMIN_KEY_VARIABLE
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.store_key import STORE_KEY_VARIABLE

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SETTINGS = {f"KVMOSAIC_{name.upper()}" for name in ChunkCacheConfig.model_fields}
YAML_RULES = (
    "{extends: default, rules: {line-length: {max: 140}, document-start: disable, braces: {max-spaces-inside: 0}}}"
)


def said_by(command: str, *paths: Path) -> str:
    """Output of a linter, which is among this environment's scripts."""
    program, *options = shlex.split(command)
    done = subprocess.run(
        [Path(sys.executable).parent / program, *options, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_yaml():
    said_by(f"yamllint --strict -d {shlex.quote(YAML_RULES)}", *DEPLOY.rglob("*.yaml"))


def test_dockerfile():
    assert not said_by("hadolint", DEPLOY / "Dockerfile")


def test_kubernetes():
    manifests = [path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.stem != "kustomization"]
    assert said_by("kubernetes-validate --strict", *manifests).count(" passed ") == 4


def test_the_kustomization_has_all_manifests():
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())
    assert {*kustomization["resources"], "kustomization.yaml"} == {
        path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")
    }


def environments():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    yield compose["services"]["vllm"]["environment"]
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes/vllm.yaml").read_text()):
        if manifest["kind"] == "Deployment":
            [container] = manifest["spec"]["template"]["spec"]["containers"]
            yield {each["name"]: each["value"] for each in container["env"]}


@pytest.mark.parametrize("environment", environments())
def test_settings_exist(environment, monkeypatch):
    ours = {name: value for name, value in environment.items() if name.startswith("KVMOSAIC_")}
    assert ours.keys() <= SETTINGS
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    config = ChunkCacheConfig()
    assert config.remote == ours["KVMOSAIC_REMOTE"]


def test_secrets_are_those_that_engines_read():
    told = (DEPLOY / "README.md").read_text()
    assert STORE_KEY_VARIABLE in told
    assert ADMIN_KEY_VARIABLE in told


def test_mounted_files_exist():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
