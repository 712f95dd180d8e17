"""``kvmosaic store --remote``, and the embedded engine over a remote tier, as users run them."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from remote_servers import Mooncake, Valkey, free_port
from store_helpers import make_entry

from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.heads import HeadShare
from kvmosaic.core.prompt import ChunkedPrompt, Span
from kvmosaic.hf import LLM
from kvmosaic.store.codec import encode
from kvmosaic.store.remote.heads import values_of
from kvmosaic.store.remote.keys import names_of, remote_key
from kvmosaic.store.seal import Seal
from kvmosaic.store.tiers.remote import RemoteTier
from tests.cli.command import run_here
from tests.engines.hf.tiny import make


def by_head(entry: ChunkKV) -> ChunkKV:
    """The entry under a key that has its heads stored one by one."""
    heads = HeadShare.of_rank(0, 1, entry.format.heads, entry.format.layers).heads
    return replace(entry, key=replace(entry.key, heads=str(heads)))


def stored_names(tier: RemoteTier) -> set[str]:
    """Names of everything in the store, including foreign keys."""
    return {name for page in tier._client.scan("") for name in page}


def kvmosaic(*arguments: str, check: int = 0, apart: bool = False) -> str:
    """Output of the command, run in this process or, if ``apart``, in a separate one."""
    if apart:
        command = [sys.executable, "-m", "kvmosaic.cli.main", "store", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    else:
        done = run_here("store", *arguments)
    assert done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if check == 0 else done.stdout + done.stderr


def result(*arguments: str, apart: bool = False) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(kvmosaic(*arguments, "--json", apart=apart))
    return parsed


@pytest.mark.slow
def test_ls_stats_verify_and_purge(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    where = ("--remote", server.url)
    for number in range(4):
        tier.put(make_entry(number, tenant="a" if number % 2 else "b"))
    assert len(result("ls", *where, apart=True)["entries"]) == 4
    assert len(result("ls", *where, "--tenant", "a")["entries"]) == 2
    stats = result("stats", *where)
    assert stats["entries"] == 4
    assert [(row["tenant"], row["model"], row["entries"]) for row in stats["owners"]] == [
        ("a", "org/model", 2),
        ("b", "org/model", 2),
    ]
    value = bytearray(b"".join(encode(make_entry(0, tenant="b"), Seal())))
    value[-1] ^= 1
    tier.delete(make_entry(0, tenant="b").key)
    tier._client.put([remote_key(make_entry(0, tenant="b").key)], [lambda: [memoryview(bytes(value))]])
    assert "4 entries checked, 1 damaged and deleted" in kvmosaic("verify", *where, check=1)
    assert result("verify", *where) == {"checked": 3, "set_aside": 0, "other_key": 0}
    assert "nothing is stored for --tenant c; there are entries for: a, b" in kvmosaic(
        "purge", *where, "--tenant", "c"
    )
    assert result("purge", *where, "--tenant", "a")["deleted"] == 2
    assert result("purge", *where, "--all")["deleted"] == 1
    assert not list(tier.scan())


def test_heads_that_are_stored_one_by_one(tier: RemoteTier, server: Valkey | Mooncake) -> None:
    """The store has an entry whose heads are stored together, a complete one with separate heads, and one that lacks
    a head and has a damaged one."""
    where, others = ("--remote", server.url), stored_names(tier)
    whole, complete, broken = make_entry(1), by_head(make_entry(2, heads=4)), by_head(make_entry(3, heads=4))
    for entry in (whole, complete, broken):
        tier.put(entry)
    names = names_of(broken.key)
    value = bytearray(b"".join(values_of(broken, Seal())[3]()))
    value[-1] ^= 1
    tier._client.delete([names[1], names[3]])
    tier._client.put([names[3]], [lambda: [memoryview(bytes(value))]])
    listed = result("ls", *where)
    parts = [row["key"].split("@")[3] for row in listed["entries"]]
    assert sorted(parts) == ["0-0of4L0-1", "0-3of4L0-1", "2-3of4L0-1", "all"]
    stats = result("stats", *where)
    assert (stats["entries"], stats["bytes"]) == (4, listed["bytes"])
    assert "4 entries checked, 1 damaged and deleted" in kvmosaic("verify", *where, check=1)
    assert names[3] not in stored_names(tier)
    assert result("purge", *where, "--all")["deleted"] == 4
    assert stored_names(tier) == others


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls",), "which store?"),
        (("ls", "--remote", "http://host"), "not the URL of a remote store"),
        (("ls", "--remote", f"valkey://127.0.0.1:{free_port()}"), "cannot be used"),
        (("purge", "--remote", "valkey://127.0.0.1", "--path", "/tmp", "--all"), "not both"),
        (("stats", "--remote", "valkey://me:secret@127.0.0.1"), "://***@127.0.0.1: a password does not belong"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    output = kvmosaic(*arguments, check=2)
    assert message in output
    assert "secret" not in output
    [line] = output.splitlines()
    assert line.startswith("error")


@pytest.mark.slow
@pytest.mark.parametrize("per_head_storage", [False, True], ids=["whole", "by head"])
def test_two_engines_share_documents(tier: RemoteTier, server: Valkey | Mooncake, per_head_storage: bool) -> None:
    """The second engine does not compute the documents again and gives the same answers. Another tenant shares
    nothing."""
    model = make("llama")
    prompt = ChunkedPrompt(tuple(range(3, 63)), (Span(5, 25), Span(25, 50)))

    def ask(tenant: str) -> tuple[str, list[tuple[str, str | None]]]:
        # On a busy machine a call may take longer than the usual deadline, and its chunks would count as missing.
        settings = {"remote": server.url, "remote_deadline_ms": 10_000, "tenant": tenant}
        settings |= {"per_head_storage": per_head_storage}
        with LLM(model, enable_chunk_cache=True, miss_policy="fill-first", **settings) as llm:
            [output] = llm.generate([prompt], max_tokens=6, temperature=0)
        return output.text, [(chunk.status, chunk.tier) for chunk in output.chunks]

    first, second, stranger = ask("a"), ask("a"), ask("b")
    assert first[0] == second[0] == stranger[0]
    assert first[1] == stranger[1] == [("filled", None)] * 2
    assert second[1] == [("cached", "remote")] * 2
