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
from tests.docs.claims import CHECKED, ENGINE, EXAMPLES, HERE, claims_about, commands
from tests.engines.vllm import test_documented_commands, test_examples
from tests.readers import readers_defaults

COMMAND = re.compile(
    r"^ *(\$ )?(\w+=\S+ )*(\S*/)?(kvmosaic|make|python3?|pip|vllm|docker|kubectl|curl) ", re.MULTILINE
)
"""A line that looks like a command, with or without the sign of a prompt."""
NOT_CODE = ("", "text")
"""Languages of drawings and printed tables."""
PYTHON = {
    "README.md: from openai import OpenAI": ENGINE,
    "README.md: from kvmosaic.hf import LLM": "here",
    "docs/howto/serve.md: from openai import OpenAI": ENGINE,
    "docs/reference/http.md: client.chat.completions.create(": ENGINE,
    "docs/structures.md: from typing import Annotated, ClassVar": "here",
}
LESS = {"eval": "--limit 1", "calibrate": "--limit 1 --ratios 0.15", "tune": "--minutes 0.3"}
"""Options that are added to commands so that they take less time, by the command's first word."""
MEASURES = [each for each in commands(HERE) if each.startswith("kvmosaic ")]
SECRETS = [each for each in commands(HERE) if "$(openssl" in each]
SEPARATORS = [each for each in commands(HERE) if "kvmosaic separator" in each]


def test_every_python_block_is_run():
    assert {each.name for each in all_blocks() if each.language == "python"} == PYTHON.keys()


def test_every_command_is_run_or_has_a_reason():
    assert all_commands()
    for command in all_commands():
        [claim] = claims_about(command)
        assert claim.why or claim.how in (HERE, ENGINE, EXAMPLES), command


def test_commands_that_are_said_to_be_run_are_run():
    """Each file with tests has lists of the commands that it runs."""
    assert {*MEASURES, *SECRETS, *SEPARATORS} == {*commands(HERE)}
    assert {*commands(ENGINE)} == test_documented_commands.RUN
    assert {command.removeprefix("python examples/").removesuffix(".py") for command in commands(EXAMPLES)} <= {
        *test_examples.WITH_SERVER
    }


def test_every_other_block_has_a_language_that_is_checked():
    assert {each.language for each in all_blocks()} <= {"python", "console", "yaml", *NOT_CODE}
    for each in all_blocks():
        assert each.language == "console" or not COMMAND.search(each.code), each.name


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


@pytest.mark.parametrize("command", commands(CHECKED))
def test_targets_and_files_of_tests_exist(command):
    if "make " in command:
        subprocess.run(["bash", "-c", f"{command} --dry-run"], cwd=ROOT, check=True, capture_output=True)
    paths = re.findall(r"tests/[\w/.]+", command)
    assert "make " in command or paths
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", SECRETS)
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
    (tmp_path / "ferry.txt").write_text(FERRY)
    (tmp_path / "bakery.txt").write_text(BAKERY)
    with readers_defaults(tmp_path / "configuration"):
        yield tmp_path


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


@pytest.mark.long
@pytest.mark.parametrize("command", MEASURES)
def test_commands_do_what_they_say(documents, command):
    """Targets that such short runs do not meet have exit status 1, and mistakes in options 2."""
    records = [FERRY, BAKERY]
    documents.joinpath("handbook").mkdir()
    for number in range(10):
        text = "\n\n".join(f"Chapter {number}, part {n}. {record}" for n in range(5) for record in records)
        documents.joinpath("handbook", f"{number}.txt").write_text(text)
    documents.joinpath("faq.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    example = {"system": "Be brief.", "chunks": records, "question": "Who owns the bakery?", "answers": ["Meyer"]}
    documents.joinpath("FILE").write_text(json.dumps(example) + "\n")
    command = command.replace("MODEL", "smollm2-135m")
    words = [*shlex.split(command)[1:], *shlex.split(LESS[command.split()[1]])]
    done = subprocess.run([sys.executable, "-m", "kvmosaic.cli.main", *words], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_separator(smollm2_folder):
    [command] = SEPARATORS
    run = f"{sys.executable} -m kvmosaic.cli.main separator {smollm2_folder}"
    script = command.replace("kvmosaic separator MODEL", run) + ' && echo "<$KVMOSAIC_CHUNK_SEPARATOR>"'
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert re.search(r"< \S.*\S >", done.stdout), done.stdout
