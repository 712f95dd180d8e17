"""Commands and code of the documentation that need vLLM, run as they are written, with the defaults of their readers.
Addresses, paths and models are replaced, and options that save time are added."""

import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest

from kvmosaic.models import resolve
from tests.docs.blocks import BAKERY, FERRY, block
from tests.docs.claims import ENGINE, commands
from tests.engines.vllm.server import served_by
from tests.readers import readers_defaults
from tests.store.remote_servers import Valkey

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]

MODEL = "smollm2-135m"
ADMIN_KEY = "a key for tests of the documentation"
SERVE = [each for each in commands(ENGINE) if "kvmosaic serve" in each]
EVERYTHING = [each for each in SERVE if each.endswith("--enable-prompt-tokens-details --client-parameters all")]
"""The server that the tests of clients share."""
POOLED = [each for each in SERVE if "--remote" in each]
SHARED = list(
    block("examples/README.md: kvmosaic store warm MODEL corpus.jsonl articles/ --disk-path /var/cache/kv").commands()
)
"""Two servers that use the same folder."""
ALONE = [each for each in SERVE if each not in (*EVERYTHING, *POOLED, *SHARED)]
CURL = [each for each in commands(ENGINE) if each.startswith("curl")]
DIRECTLY = [each for each in commands(ENGINE) if each.startswith("vllm serve") and "--kv-transfer-config" in each]
MIDDLEWARE = [each for each in commands(ENGINE) if each.startswith("vllm serve") and "--middleware" in each]
WARM_RANKS = [each for each in commands(ENGINE) if "store warm" in each and "--tensor-parallel-size 2" in each]
RUN = {*EVERYTHING, *POOLED, *SHARED, *ALONE, *CURL, *DIRECTLY, *MIDDLEWARE, *WARM_RANKS}
"""The commands that tests of this file run."""
PROGRAMS = {
    "kvmosaic": ["-m", "kvmosaic.cli.main"],
    # `vllm serve` without vLLM's own `main()`, which does not start in CPU builds, because they have another name.
    "vllm": [
        "-c",
        "import sys; from kvmosaic.engines.vllm.compat.server import ServeCommand as C; c = C(); "
        "c.run(c.parse(sys.argv[2], sys.argv[3:]))",
    ],
}


@pytest.fixture(scope="module", autouse=True)
def defaults(tmp_path_factory):
    with readers_defaults(tmp_path_factory.mktemp("configuration")), pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVMOSAIC_CHUNK_ADMIN_KEY", ADMIN_KEY)
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        yield


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """Create the files that the examples name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("ferry.txt").write_text(FERRY)
    tmp_path.joinpath("bakery.txt").write_text(BAKERY)
    tmp_path.joinpath("articles").mkdir()
    tmp_path.joinpath("articles", "bakery.txt").write_text(BAKERY)
    tmp_path.joinpath("corpus.jsonl").write_text(json.dumps({"text": FERRY}) + "\n")
    return tmp_path


def prepared(command, model=MODEL):
    """Variables and words of a command, for the packages of this environment."""
    words = shlex.split(re.sub(r" --port \d+", "", command).replace("MODEL", model))  # tests have ports of their own
    count = next(at for at, word in enumerate(words) if not re.match(r"\w+=", word))
    program = PROGRAMS[words[count].rpartition("/")[2]]
    return dict(word.split("=", 1) for word in words[:count]), [sys.executable, *program, *words[count + 1 :]]


@contextmanager
def started(command, log, model=MODEL, before="true"):
    """The URL of the server that ``command`` starts after the shell's command ``before``."""
    variables, words = prepared(command, model)
    shell = ["bash", "-c", f'{before} && exec "$@"', "bash"]
    with served_by([*shell, *words, "--max-model-len", "2048"], log, **variables) as url:
        assert "chunk cache on" in log.read_text()
        yield url


def warm(command, model):
    """Fill the folder that a command names."""
    variables, words = prepared(command, model)
    assert not variables
    if "--vllm-options" not in words:
        words += ["--vllm-options", ""]
    words[words.index("--vllm-options") + 1] += " --enforce-eager"
    done = subprocess.run([*words, "--dtype", "float32"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def ask(url, documents, number=0):
    """Ask about documents that are parts of a message, after a system prompt that no prefix cache has."""
    parts = [{"type": "text", "text": text} for text in (*documents, "When does the ferry leave?")]
    messages = [{"role": "system", "content": f"{number} is the number of this request."}]
    messages.append({"role": "user", "content": parts})
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        [model] = json.loads(answer.read())["data"]
    post(f"{url}/v1/chat/completions", {"model": model["id"], "messages": messages, "max_tokens": 32})


def counted(url, name, **labels):
    """Sum of a counter of ours."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(f"kvmosaic:{name}{{")]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.split()[-1]) for line in lines if all(each in line for each in wanted))


def check_reuse(url, least=300):
    """Documents are stored in the background, so they are asked for a few times, in changing orders."""
    for number in range(10):
        if counted(url, "tokens_total", kind="reused") > least:
            return
        ask(url, [FERRY, BAKERY][:: -1 if number % 2 else 1], number)
    raise AssertionError("nothing was reused")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server that allows everything that the examples of clients need."""
    [command] = EVERYTHING
    with started(command, tmp_path_factory.mktemp("serve") / "log") as url:
        yield url


def run(name, url, **known):
    exec(block(name).code.replace("http://localhost:8000", url), known)


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


@pytest.mark.parametrize("command", CURL)
def test_the_administrators_commands(command, url):
    done = subprocess.run(
        ["bash", "-c", command.replace("http://localhost:8000", url)], check=True, capture_output=True, text=True
    )
    assert '"documents"' in done.stdout


@pytest.mark.parametrize("command", ALONE)
def test_servers(command, tmp_path):
    with started(command, tmp_path / "log") as url:
        check_reuse(url)


def number_of_values(valkey):
    with socket.create_connection(("127.0.0.1", valkey.port), 20) as connection:
        connection.sendall(b"DBSIZE\r\n")
        return int(connection.recv(100)[1:])


@pytest.mark.parametrize("command", POOLED)
def test_a_server_with_a_remote_tier(command, tmp_path):
    folder = tmp_path / "valkey"
    folder.mkdir()
    valkey = Valkey(folder)
    try:
        with started(command.replace("cache.internal:6379", f"127.0.0.1:{valkey.port}"), tmp_path / "log") as url:
            check_reuse(url)
            deadline = time.monotonic() + 60
            while number_of_values(valkey) < 2:  # they are written in the background
                assert time.monotonic() < deadline
                time.sleep(1)
    finally:
        valkey.kill()


@pytest.mark.usefixtures("documents")
def test_two_servers_share_a_folder(tmp_path):
    """Both run at once, and find what the command filled ahead of time, and what the other stores later."""
    folder, later = tmp_path / "kv", BAKERY.replace("bakery", "mill")
    warming, variable, *servers = [each.replace("/var/cache/kv", str(folder)) for each in SHARED]
    warm(warming, MODEL)
    assert stored_documents(folder) == 2
    with (
        started(servers[0], tmp_path / "first", before=variable) as first,
        started(servers[1], tmp_path / "second", before=variable) as second,
    ):
        for number, url in enumerate((first, second)):
            ask(url, [BAKERY, FERRY], number)
            assert counted(url, "chunk_hits_total", tier="disk") == 2
            assert counted(url, "chunks_filled_total") == 0
        for number in range(2, 12):
            if stored_documents(folder) == 3:
                break
            ask(first, [later, FERRY], number)
        ask(second, [FERRY, later], 12)
        assert counted(second, "chunk_hits_total", tier="disk") == 3
        assert counted(second, "chunks_filled_total") == 0


def stored_documents(folder):
    """Number of documents in a folder. The ends of system prompts, which are stored as well, have fewer tokens."""
    return sum(int(path.stem.split("-")[1]) > 100 for path in folder.rglob("*.safetensors"))


@pytest.mark.usefixtures("documents")
@pytest.mark.parametrize("command", WARM_RANKS)
def test_warming_with_two_ranks(command, tmp_path, tiny_text):
    """SmolLM2's heads cannot be split over two ranks."""
    warm(command.replace("/var/cache/kv", str(tmp_path / "kv")), tiny_text)
    assert len(list(tmp_path.joinpath("kv").rglob("*.safetensors"))) == 2 * 2


@pytest.mark.parametrize("command", DIRECTLY)
def test_vllm_itself_with_our_connector(command, tmp_path):
    """Without the middleware, requests have to name their documents. Each begins differently, because vLLM's prefix
    cache answers a prompt that was prefilled before."""
    with started(command, tmp_path / "log", str(resolve(MODEL))) as url:
        for number, order in enumerate(([FERRY, BAKERY], [BAKERY, FERRY]) * 5):
            named = {"documents": [FERRY, BAKERY]}
            post(
                f"{url}/v1/completions",
                {
                    "model": str(resolve(MODEL)),
                    "prompt": "\n\n".join([f"Question {number}.", *order, "Who owns the bakery?"]),
                    "max_tokens": 32,
                    "kv_transfer_params": named,
                },
            )
            if counted(url, "tokens_total", kind="reused") > 300:
                return
        raise AssertionError("nothing was reused")


@pytest.mark.parametrize("command", MIDDLEWARE)
def test_vllm_itself_with_our_middleware(command, tmp_path):
    """The dots stand for the options of the other command."""
    [directly] = DIRECTLY
    with started(command.replace("…", directly.split("MODEL ")[1]), tmp_path / "log", str(resolve(MODEL))) as url:
        check_reuse(url)
