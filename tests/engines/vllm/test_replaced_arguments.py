"""Users' arguments that the chunk cache has to replace are refused in one line, before anything is started."""

import json

import pytest
import yaml
from vllm.config import KVTransferConfig

from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.arguments import CONNECTOR, MIDDLEWARE, WORKER
from kvmosaic.engines.vllm.command_line import server_options
from kvmosaic.engines.vllm.compat.server import ServeCommand
from kvmosaic.vllm import LLM
from tests.cli.command import run_here
from tests.engines.vllm.helpers import SMALL

OTHER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
TEXT = json.dumps(OTHER)
DOTTED = ("--kv-transfer-config.kv_connector", "OffloadingConnector", "--kv-transfer-config.kv_role=kv_both")
ON, OFF = load_config(enable_chunk_cache=True), load_config(enable_chunk_cache=False)


def parsed(model, *options, config=ON):
    return server_options(ServeCommand(), model, options, config)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--kv-transfer-config", TEXT), "kv_transfer_config"),
        (("--kv_transfer_config", TEXT), "kv_transfer_config"),
        ((f"--kv-transfer-config={TEXT}",), "kv_transfer_config"),
        (("--kv-transfer-conf", TEXT), "kv_transfer_config"),
        (DOTTED, "kv_transfer_config"),
        (tuple(text.replace("kv-transfer-config", "kv_transfer_config") for text in DOTTED), "kv_transfer_config"),
        (("--worker-cls", "mine.Worker"), "worker_cls=mine.Worker"),
        (("--worker_cls=mine.Worker",), "worker_cls=mine.Worker"),
    ],
)
def test_serve_refuses_every_spelling(tiny_llama, options, named):
    done = run_here("serve", tiny_llama, "--enable-chunk-cache", *options)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"error: {named}: ")
    assert "leave it out, or turn the chunk cache off" in line


def test_serve_refuses_those_in_a_file(tiny_llama, tmp_path):
    (tmp_path / "options.yaml").write_text(yaml.safe_dump({"kv-transfer-config": OTHER}))
    with pytest.raises(ConfigError, match=r"^kv_transfer_config: "):
        parsed(tiny_llama, "--config", str(tmp_path / "options.yaml"))


def test_what_serve_passes_on(tiny_llama):
    ours = parsed(tiny_llama, "--port", "8001")
    assert (ours.worker_cls, ours.kv_transfer_config.kv_connector) == (WORKER, CONNECTOR)
    assert ours.kv_transfer_config.kv_connector_extra_config["enable_chunk_cache"] is True
    assert (ours.middleware, ours.port) == ([MIDDLEWARE], 8001)
    # They replace nothing.
    same = parsed(tiny_llama, "--worker-cls", "auto", "--middleware", MIDDLEWARE)
    assert (same.worker_cls, same.middleware) == (WORKER, [MIDDLEWARE])
    theirs = parsed(tiny_llama, "--kv-transfer-config", TEXT, "--worker-cls", "mine.Worker", config=OFF)
    assert (theirs.worker_cls, theirs.kv_transfer_config.kv_connector) == ("mine.Worker", "OffloadingConnector")
    assert theirs.middleware == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--nonsense",), "unrecognized arguments: --nonsense"),
        (("--port", "many"), "argument --port: invalid int value: 'many'"),
        (("--enable-auto-tool-choice",), "--enable-auto-tool-choice requires --tool-call-parser"),
        (("--config", "options.txt"), "Config file must be of a yaml/yml type. txt supplied"),
    ],
)
def test_a_mistake_in_vllms_options_is_one_line(tiny_llama, options, line):
    done = run_here("serve", tiny_llama, *options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {line}")


class OwnWorker:
    """A worker of the user's."""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv_transfer_config": OTHER}, "kv_transfer_config"),
        ({"kv_transfer_config": KVTransferConfig(**OTHER)}, "kv_transfer_config"),
        ({"worker_cls": "mine.Worker"}, "worker_cls=mine.Worker"),
        ({"worker_cls": OwnWorker}, "worker_cls=OwnWorker"),
    ],
    ids=["connector", "object", "worker", "class"],
)
def test_llm_refuses_them(tiny_llama, arguments, named):
    with pytest.raises(ConfigError, match=f"^{named}: .* leave it out") as caught:
        LLM(tiny_llama, enable_chunk_cache=True, skip_tokenizer_init=True, **SMALL | arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.engine
def test_without_the_chunk_cache_llm_passes_them_on(tiny_llama):
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):  # vLLM's own, which looks for it
        LLM(tiny_llama, skip_tokenizer_init=True, worker_cls="no_such_module.Worker", **SMALL)
