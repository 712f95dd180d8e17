"""Engines are killed by SIGKILL in the middle of a put or a get. Other engines on the same pool notice nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.store.remote.mooncake import MooncakeClient
from kvmosaic.store.remote.resp import Connection
from tests.engines.vllm.helpers import PART, ROOT, ask, store
from tests.engines.vllm.processes import EngineApart
from tests.engines.vllm.stalling_link import StallingLink
from tests.engines.vllm.tiny import write_model
from tests.store.remote_servers import Mooncake, Valkey

pytestmark = pytest.mark.engine

PARTS = 6
LAYERS, HEADS, HEAD_DIM = 8, 8, 128
ENTRY_BYTES = LAYERS * 2 * HEADS * PART * HEAD_DIM * 4
"""Size of an entry, 16 MiB, so that a transfer takes long enough to be interrupted."""
FEW = f"{5 * ENTRY_BYTES // 2}B"
"""Memory for two entries, so that all others are read from the pool every time."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with little to compute and much to store."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    return write_model(tmp_path_factory.mktemp("model") / "llama", LlamaForCausalLM(config))


def asked(llm, prompt, salt):
    """The answer's tokens, the number of the prompt's cached tokens, and failed writes. At the end everything is in
    the pool, and vLLM's own prefix cache is empty."""
    [output] = ask(llm, prompt, salt=salt)
    ask(llm, [15, 16, 17])  # its step stores the last parts
    assert llm.reset_prefix_cache()
    store().flush()
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens,
        "write_errors": store().get_stats()["write_errors"],
    }


class Engine(EngineApart):
    """An engine that will be killed."""

    def __init__(self, model: str, **settings) -> None:
        super().__init__(model, prefix_blocks=True, skip_tokenizer_init=True, **settings)

    def begin(self, prompt, salt=None) -> None:
        self.send(asked, prompt, salt)

    def ask(self, prompt, salt=None):
        return self.call(asked, prompt, salt)


def draw(seed):
    chance = random.Random(seed)
    return [chance.randrange(10, 500) for _ in range(PARTS * PART + 10)]


def verify(*where: str) -> int:
    """Number of entries in the pool, all of which are checked to be complete."""
    command = [sys.executable, "-m", "kvmosaic.cli.main", "store", "verify", *where, "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["checked"]


def until(condition, process):
    """The result of ``condition``, which may hold for milliseconds only."""
    while (found := condition()) is None:
        assert process.is_alive()
        time.sleep(0.0005)
    return found


def half_written(folder: Path) -> Path | None:
    """A file without its header, which is written last."""
    for path in folder.glob("incoming/*"):
        with suppress(FileNotFoundError), path.open("rb") as file:
            if not any(file.read(8)):
                return path
    return None


def opened(pid: int) -> list[str]:
    """The files that a process has open."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    return links


def entry_opened(process) -> str | None:
    return next((link for link in opened(process.pid) if link.endswith(".safetensors")), None)


def stopped_while(condition, process):
    """The result of ``condition``, if the process could be stopped while it held."""

    def is_stopped():
        threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
        return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads) or None

    if condition() is None:
        return None
    os.kill(process.pid, signal.SIGSTOP)
    until(is_stopped, process)
    if found := condition():
        return found
    os.kill(process.pid, signal.SIGCONT)
    return None


def served(engine, plain=None):
    """The answer to the first prompt, whose documents all come from the pool. Its tokens are those of plain vLLM."""
    if plain is None:
        said = engine.ask(draw(0), salt="kept apart")
        assert said["cached"] == 0
        plain = said["tokens"]
        assert engine.ask(draw(0))["tokens"] == plain  # whatever is left of it
    again = engine.ask(draw(0))
    assert again == {"tokens": plain, "cached": PARTS * PART, "write_errors": 0}
    return plain


def test_engines_that_share_a_directory(model, tmp_path):
    settings, where = {"disk_path": str(tmp_path), "host_memory": FEW}, ("--path", str(tmp_path))
    writer = Engine(model, **settings)
    for seed in range(3):
        writer.begin(draw(seed))
    left = until(lambda: stopped_while(lambda: half_written(tmp_path), writer.process), writer.process)
    writer.kill()
    assert half_written(tmp_path) == left
    verify(*where)

    reader = Engine(model, **settings)
    plain = served(reader)
    for _ in range(9):
        reader.begin(draw(0))
    until(lambda: stopped_while(lambda: entry_opened(reader.process), reader.process), reader.process)
    reader.kill()
    assert verify(*where) >= PARTS

    # The killed engine had pinned everything that it was about to read, which is more than fits now.
    survivor = Engine(model, **settings, disk_space=f"{2 * ENTRY_BYTES + 2**20}B")
    served(survivor, plain)
    assert left.exists()  # its writer might just be slow
    os.utime(left, (0, 0))
    assert survivor.ask(draw(7))["write_errors"] == 0
    survivor.stop()
    assert not left.exists()
    assert 1 <= verify(*where) <= 2


def sockets(pid: int) -> set[str]:
    """The inodes of a process's sockets."""
    return {link.removeprefix("socket:[").removesuffix("]") for link in opened(pid) if link.startswith("socket:")}


def sent_unread(sender: int, receiver: int) -> bool | None:
    """Whether one process has sent another data that it has not read yet."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    senders, receivers = sockets(sender), sockets(receiver)
    ports = {line[1].rpartition(":")[2] for line in lines if line[9] in senders}
    waiting = [line for line in lines if line[9] in receivers and line[2].rpartition(":")[2] in ports]
    return any(int(line[4].rpartition(":")[2], 16) for line in waiting) or None


@pytest.mark.long
def test_engines_that_share_holders(model, tmp_path):
    """The holder is stopped while values are being transferred."""
    pool = Mooncake(tmp_path, client_ttl=120, put_start_discard_timeout_sec=1)
    holder, where = pool.holder, ("--remote", pool.url)
    settings = {"remote": pool.url, "per_head_storage": True, "remote_deadline_ms": 60_000, "host_memory": FEW}
    client = MooncakeClient(RemoteUrl.parse(pool.url), 5)
    try:
        writer = Engine(model, **settings)
        for seed in range(3):
            writer.begin(draw(seed))
        until(lambda: next(client.scan(""), None), writer.process)
        holder.pause()
        until(lambda: sent_unread(writer.pid, holder.pid), writer.process)
        writer.kill()
        holder.resume()
        whole = verify(*where)

        reader = Engine(model, **settings)
        plain = served(reader)
        assert verify(*where) >= max(whole, PARTS)
        holder.pause()
        reader.begin(draw(0))
        until(lambda: sent_unread(reader.pid, holder.pid), reader.process)
        reader.kill()
        holder.resume()
        assert verify(*where) >= PARTS

        survivor = Engine(model, **settings)
        served(survivor, plain)
        survivor.stop()
        verify(*where)
    finally:
        pool.kill()


def evicted(url: str) -> int:
    """Values that a server dropped to make room."""
    connection = Connection(RemoteUrl.parse(url), 5)
    connection.send([("INFO", "stats")])
    [line] = [line for line in connection.reply().decode().split() if line.startswith("evicted_keys:")]
    connection.close()
    return int(line.partition(":")[2])


@pytest.mark.long
def test_engines_that_share_a_server(model, tmp_path):
    server = Valkey(tmp_path, maxmemory=str(9 * ENTRY_BYTES), maxmemory_policy="allkeys-lru")
    link, where = StallingLink(server.port), ("--remote", server.url)
    settings = {"remote": f"valkey://127.0.0.1:{link.port}", "per_head_storage": True, "remote_deadline_ms": 60_000}
    try:
        writer = Engine(model, **settings, host_memory=FEW)
        link.stall("up", after=ENTRY_BYTES * 3 // 2)  # one entry, and half the heads of another
        writer.begin(draw(0))
        assert link.stalled.wait(200)
        writer.kill()
        link.cut()
        verify(*where)

        reader = Engine(model, **settings, host_memory=FEW)
        plain = served(reader)
        link.stall("down", after=ENTRY_BYTES // 2)
        reader.begin(draw(0))
        assert link.stalled.wait(200)
        reader.kill()
        link.cut()
        assert verify(*where) == PARTS

        survivor = Engine(model, **settings, host_memory=FEW)
        served(survivor, plain)
        for seed in (7, 8):
            assert survivor.ask(draw(seed))["write_errors"] == 0
        survivor.stop()
        verify(*where)
        assert evicted(server.url) > 0
    finally:
        server.kill()
