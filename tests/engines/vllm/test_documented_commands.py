"""Commands and code of the documentation that need vLLM, run as they are written, except for addresses and models."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.docs.blocks import BAKERY, FERRY, all_commands, block
from tests.engines.vllm.server import served_by, serving

pytestmark = [pytest.mark.engine, pytest.mark.long]

ADMIN_KEY = "a key for tests of the documentation"
TALKING = {"VLLM_LOGGING_LEVEL": "INFO", "KVMOSAIC_CHUNK_ADMIN_KEY": ADMIN_KEY}
SERVES = re.compile(r"(\w+=\w+ )*(\.venv-vllm/bin/)?kvmosaic serve (MODEL|smollm2-135m)")
SERVE = [each for each in all_commands() if SERVES.match(each)]


def options_of(command):
    """The options of a command besides ``--enable-chunk-cache``."""
    words = shlex.split(re.sub(r" --port \d+", "", command))  # tests have ports of their own
    return [word for word in words[words.index("serve") + 2 :] if word != "--enable-chunk-cache"]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The README's server, which also allows the parameters of other pages."""
    [command] = [each for each in SERVE if options_of(each) == ["--enable-prompt-tokens-details"]]
    options = [*options_of(command), "--max-model-len", "2048", "--client-parameters", "all"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving("smollm2-135m", log, *options, KVMOSAIC_CHUNK_ADMIN_KEY=ADMIN_KEY) as url:
        yield url


def run(name, url, **known):
    exec(block(name).code.replace("http://localhost:8000", url), known)


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """Create the files that the examples name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("ferry.txt").write_text(FERRY)
    tmp_path.joinpath("bakery.txt").write_text(BAKERY)


@pytest.mark.usefixtures("documents")
def test_the_readmes_client(url, capsys):
    run("README.md: from openai import OpenAI", url)
    cached = [int(number) for number in re.findall(r"cached_tokens=(\d+)", capsys.readouterr().out)]
    assert len(cached) == 2
    assert cached[1] > 400


@pytest.mark.usefixtures("documents")
def test_how_to_serve(url, capsys):
    run("docs/howto/serve.md: from openai import OpenAI", url)
    assert "'mode': 'reuse'" in capsys.readouterr().out


def test_the_http_reference(url):
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    run(
        "docs/reference/http.md: client.chat.completions.create(", url, client=client, documents=[FERRY], question="?"
    )


def test_the_administrators_commands(url):
    [command] = [each for each in all_commands() if each.startswith("curl")]
    script = f"KVMOSAIC_CHUNK_ADMIN_KEY='{ADMIN_KEY}'; {command.replace('http://localhost:8000', url)}"
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert '"documents"' in done.stdout


@pytest.mark.parametrize("command", [each for each in SERVE if "--remote" not in each and options_of(each)][1:])
def test_other_servers_start(command, tmp_path):
    with serving("smollm2-135m", tmp_path / "log", *options_of(command), "--max-model-len", "2048", **TALKING):
        assert "chunk cache on" in (tmp_path / "log").read_text()


def test_vllm_itself_with_our_connector(tmp_path):
    """Start the server as ``vllm serve`` does. Its own ``main()`` does not start in CPU builds, which have another
    name."""
    [command] = [each for each in all_commands() if each.startswith("vllm serve") and "--kv-transfer-config" in each]
    pull = [sys.executable, "-m", "kvmosaic.cli.main", "models", "pull", "smollm2-135m"]
    folder = subprocess.run(pull, check=True, capture_output=True, text=True).stdout.split()[-1]
    script = "import sys; from kvmosaic.engines.vllm.compat.server import ServeCommand as C; c = C(); "
    script += "c.run(c.parse(sys.argv[1], sys.argv[2:]))"
    started = [sys.executable, "-c", script, folder, *shlex.split(command)[3:], "--max-model-len", "2048"]
    with served_by(started, tmp_path / "log", **TALKING):
        assert "chunk cache on" in (tmp_path / "log").read_text()
