"""The examples: each runs as its reader would run it, with the defaults, and reuses documents in its last request."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.server import serving
from tests.readers import readers_defaults

pytestmark = [pytest.mark.engine, pytest.mark.long]

EXAMPLES = Path(__file__).parents[3] / "examples"
WITH_SERVER = [
    *("openai_parts", "langchain_rag", "langchain_named", "llama_index_named"),
    *("agent_tools", "read_report"),
]


@pytest.fixture(scope="module", autouse=True)
def defaults(tmp_path_factory):
    with readers_defaults(tmp_path_factory.mktemp("configuration")):
        yield


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    options = "--max-model-len 2048 --enable-prompt-tokens-details --client-parameters all"
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving("smollm2-135m", log, *options.split()) as url:
        yield url


def printed(name, **environment):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_reuse(text):
    cached, prompt = map(int, re.findall(r"cached (\d+) of (\d+)", text)[-1])
    assert cached > 0.5 * prompt, text


@pytest.mark.parametrize("name", WITH_SERVER)
def test_with_a_server(url, name):
    text = printed(name, OPENAI_BASE_URL=f"{url}/v1")
    if name == "read_report":
        assert int(re.findall(r"reused tokens: (\d+)", text)[-1]) > 100, text
    else:
        check_reuse(text)


def test_without_a_server():
    check_reuse(printed("offline_batch", VLLM_CPU_KVCACHE_SPACE="1"))


def test_all_are_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*WITH_SERVER, "offline_batch", "library"}
