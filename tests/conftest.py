"""Shared fixtures: the small real model and its tokenizer, seeds, and the number of Hypothesis' examples."""

import logging
import os
from collections.abc import Generator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available() and find_spec("vllm") is None:
    # Our kernels run in Triton's interpreter, which has to be set before Triton is imported; vLLM's kernels must not.
    os.environ["TRITON_INTERPRET"] = "1"

# Tests reuse chunks without recomputing unless they choose a ratio.
os.environ.setdefault("KVMOSAIC_RECOMPUTE_RATIO", "0")

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvmosaic.models import resolve
from tests import seeds
from tests.examples import EXAMPLES

settings.register_profile("kvmosaic", max_examples=EXAMPLES, deadline=None)  # a busy machine would miss any deadline
settings.load_profile("kvmosaic")


@pytest.fixture
def default_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default settings of users."""
    monkeypatch.delenv("KVMOSAIC_RECOMPUTE_RATIO", raising=False)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seeds.SESSION)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with long tests first. The last files are then quick, so no core waits long for another."""
    late = {item.path for item in items} - {
        item.path for item in items if item.get_closest_marker("engine") or item.get_closest_marker("slow")
    }
    items.sort(key=lambda item: item.path in late)


def pytest_report_header() -> list[str]:
    lines = [f"seed: {seeds.VARIABLE}={seeds.SESSION}"]
    if find_spec("vllm") is None:
        lines.append("no vLLM here: tests/engines/vllm and tests/soak are left out (make test-vllm runs them)")
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeat the seed after a failure: the header may be far above, and `-q` leaves it out."""
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"to draw the same numbers again: {seeds.VARIABLE}={seeds.SESSION}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed by the test's own name, so that order and process do not matter."""
    seeds.seed_all(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Shared fixtures must not depend on the test that comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with seeds.seeded(f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param', '')}"):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def no_profiles(tmp_path_factory):
    """The user's own profiles must not change engines, in this process or in those that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVMOSAIC_PROFILES_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield


@pytest.fixture(autouse=True)
def own_log_levels():
    """Commands that run in this process set log levels for all of it, and later tests read the log."""
    yield
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("kvmosaic") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def smollm2_folder():
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder):
    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder):
    return AutoModelForCausalLM.from_pretrained(smollm2_folder).eval()


@pytest.fixture(scope="session")
def narrow(smollm2_folder):
    """A narrow model with SmolLM2's depth, vocabulary and positions, and random weights, for tests that need no
    language."""
    config = AutoConfig.from_pretrained(smollm2_folder)
    config.update(
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "initializer_range": 0.2,  # large, so that attention is far from uniform
        }
    )
    torch.manual_seed(0)  # the same in every run: whether a policy beats another depends on the weights
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="session")
def narrow_folder(narrow, tokenizer, tmp_path_factory):
    """The narrow model as a folder, for commands that load a model."""
    folder = tmp_path_factory.mktemp("models") / "narrow"
    narrow.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
