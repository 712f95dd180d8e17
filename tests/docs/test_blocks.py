"""Every code block and every command of the documentation works: it is run here, or by a test with an engine, or it
is listed with the reason why not."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import typer
import yaml

from kvmosaic.blend import choose
from kvmosaic.cli.main import app
from kvmosaic.core.config import load_config
from tests.blend.drawn import Drawn
from tests.docs.blocks import BAKERY, FERRY, ROOT, all_blocks, all_commands, block, inline_commands

ENGINE = "tests/engines/vllm/test_documented_commands.py"
"""Runs blocks that need vLLM."""
NOT_CODE = ("", "text")
"""Languages of drawings and printed tables."""
PYTHON = {
    "README.md: from openai import OpenAI": ENGINE,
    "README.md: from kvmosaic.hf import LLM": "here",
    "docs/howto/serve.md: from openai import OpenAI": ENGINE,
    "docs/reference/http.md: client.chat.completions.create(": ENGINE,
    "docs/structures.md: from typing import Annotated, ClassVar": "here",
}
COMMANDS = [
    (r"(\w+=\w+ )*(\.venv-vllm/bin/)?kvmosaic serve|vllm serve|curl|python examples/", ENGINE),
    (r"kvmosaic (eval|calibrate|tune|store warm)\b", "here"),
    (r"kvmosaic doctor\b", "tests/engines/vllm/test_doctor.py"),
    (r"make ", "here"),
    (r"(\w+=\w+ )*\.venv[-\w]*/bin/python -m pytest", "here"),
    (r"export \w+=", "here"),
    (r"python3 -m venv \.venv && \.venv/bin/pip install 'torch", "fetches torch from its own index"),
    (r"pip install -e '\.\[vllm\]'", "needs a GPU"),
    (r"python -m tests.ascend_report", "needs an NPU; tests/engines/vllm/ascend/test_report.py runs its parts"),
    (r"mooncake_", "needs several machines; tests/store/servers.py starts both with other addresses"),
    (r"docker|MODEL=\S+ docker|kubectl", "needs Docker or a cluster; tests/test_deploy.py checks the files"),
]
"""Patterns of commands, with the file that runs them, or the reason why they are not run."""


def test_every_python_block_is_run():
    assert {each.name for each in all_blocks() if each.language == "python"} == PYTHON.keys()


def test_every_command_is_run_or_has_a_reason():
    assert all_commands()
    for command in all_commands():
        assert sum(re.match(pattern, command) is not None for pattern, _ in COMMANDS) == 1, command


def test_every_other_block_has_a_language_that_is_checked():
    assert {each.language for each in all_blocks()} <= {"python", "console", "yaml", *NOT_CODE}
    for each in all_blocks():
        assert each.language == "console" or "$ kvmosaic" not in each.code, each.name


@pytest.mark.parametrize(
    "each", [each for each in all_blocks() if each.language == "yaml"], ids=lambda each: each.name
)
def test_settings_can_be_read(each):
    assert load_config(**yaml.safe_load(each.code)).enable_chunk_cache


def command_for(words):
    """The innermost command that these words call, and the words behind it."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("command", inline_commands())
def test_commands_in_sentences_exist(command):
    called, words = command_for([word for word in re.split(r"[\s\[\]|=]+", command)[1:] if word and "…" not in word])
    known = {option for param in called.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    options = {word for word in words if re.fullmatch(r"--[\w-]+", word)}
    if called.name != "serve":  # which passes other options on to vLLM
        assert options <= known


@pytest.mark.parametrize("command", [each for each in all_commands() if each.startswith("make ")])
def test_targets_exist(command):
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", [each for each in all_commands() if "pytest" in each])
def test_files_of_tests_exist(command):
    for path in re.findall(r"tests/[\w/.]+", command):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", [each for each in all_commands() if re.match(r"export \w+=\$\(openssl", each)])
def test_secrets_are_long_enough(command):
    variable = re.match(r"export (\w+)", command)[1]
    done = subprocess.run(
        ["bash", "-c", f"{command} && echo ${variable}"], check=True, capture_output=True, text=True
    )
    assert len(done.stdout.strip()) >= 16


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """The files that the examples name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVMOSAIC_PROFILES_DIR", str(tmp_path / "profiles"))
    (tmp_path / "ferry.txt").write_text(FERRY)
    (tmp_path / "bakery.txt").write_text(BAKERY)
    return tmp_path


@pytest.mark.slow
def test_the_readmes_python(documents, capsys):
    exec(block("README.md: from kvmosaic.hf import LLM").code, {})
    assert "['cached', 'cached']" in capsys.readouterr().out


def test_the_example_of_a_policy():
    """Three system tokens, two chunks of ten, a question; a quarter of the chunk tokens may be recomputed."""
    known = {"__name__": __name__}
    exec(block("docs/structures.md: from typing import Annotated, ClassVar").code, known)
    prompt = Drawn([10, 10], system=3, question=5, layers=4, full=[0, 1, 2, 3], seed=0)
    assert choose(known["Front"](), prompt, 0.25).positions == (3, 4, 5, 6, 7)
    assert choose(known["Front"](most=2), prompt, 0.25).positions == (3, 4)


LESS = {"eval": "--limit 1", "calibrate": "--limit 1 --ratios 0.15", "tune": "--minutes 0.3", "store": "--engine hf"}
"""Options that are added to commands so that they take less time, by the command's first word."""


@pytest.mark.long
@pytest.mark.parametrize("command", [each for each in all_commands() if re.match(COMMANDS[1][0], each)])
def test_commands_do_what_they_say(documents, command):
    """Targets that such short runs do not meet have exit status 1, and mistakes in options 2."""
    records = [FERRY, BAKERY]
    for name in ("handbook", "articles"):
        documents.joinpath(name).mkdir()
        for number in range(10):
            text = "\n\n".join(f"Chapter {number}, part {n}. {record}" for n in range(5) for record in records)
            documents.joinpath(name, f"{number}.txt").write_text(text)
    for name in ("faq.jsonl", "corpus.jsonl"):
        documents.joinpath(name).write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    example = {"system": "Be brief.", "chunks": records, "question": "Who owns the bakery?", "answers": ["Meyer"]}
    documents.joinpath("FILE").write_text(json.dumps(example) + "\n")
    command = command.replace("MODEL", "smollm2-135m").replace("/var/cache/kv", "kv")
    command = re.sub(r" --vllm-options '[^']*'", "", command)  # the embedded engine has none
    words = [*shlex.split(command)[1:], *shlex.split(LESS[command.split()[1]])]
    done = subprocess.run([sys.executable, "-m", "kvmosaic.cli.main", *words], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_separator(smollm2_folder):
    [command] = [each for each in all_commands() if "kvmosaic separator" in each]
    run = f"{sys.executable} -m kvmosaic.cli.main separator {smollm2_folder}"
    script = command.replace("kvmosaic separator MODEL", run) + ' && echo "<$KVMOSAIC_CHUNK_SEPARATOR>"'
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert re.search(r"< \S.*\S >", done.stdout), done.stdout
