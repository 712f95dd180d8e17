"""``kvmosaic bench store``, as users run it: its output, and that it leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from remote_servers import Mooncake, Valkey, free_port
from store_helpers import make_entry, same

from kvmosaic.store.tiers.remote import RemoteTier

pytestmark = pytest.mark.slow
SMALL = ("--entries", "2", "--tokens", "5", "--layers", "2", "--heads", "4", "--head-dim", "8")


def bench(*arguments: str, check: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmosaic.cli.main", "bench", "store", *SMALL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_rows_of_a_remote_tier(tier: RemoteTier, server: Valkey | Mooncake, tmp_path: Path) -> None:
    users = make_entry(1)
    tier.put(users)
    done = bench("--remote", server.url, "--disk-path", str(tmp_path), "--json")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    moved = [row for row in rows if "tier" in row]
    names = {(row["tier"], row["operation"]) for row in moved}
    assert names == {(name, operation) for name in ("host", "disk", server.kind) for operation in ("put", "get")}
    for row in moved:
        assert min(row["ratio"], row["ours_mb_per_s"], row["plain_mb_per_s"]) > 0
        assert row["plain"]
    lookups = [row for row in rows if "lookup" in row]
    assert {row["plain"] for row in lookups} == {row["plain"] for row in moved if row["tier"] == server.kind}
    for row in lookups:
        assert (row["lookup"], row["keys"]) == (server.kind, 2048)
        assert min(row["ratio"], row["ours_ms"], row["plain_ms"]) > 0
    # None of the user's entries was touched, and none of its own is left.
    assert [info.key for info in tier.scan()] == [users.key]
    found = tier.get(users.key)
    assert found is not None
    assert same(found, users)
    assert not [name for page in tier._client.scan("bench-") for name in page]
    assert not list(tmp_path.iterdir())


def test_without_a_remote_store(tmp_path: Path) -> None:
    output = bench("--disk-path", str(tmp_path)).stdout
    assert "host" in output
    assert "disk" in output
    assert "look-up" not in output


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://host", "not the URL of a remote store"), (f"valkey://127.0.0.1:{free_port()}", "refused")],
    ids=["no URL of a store", "nobody there"],
)
def test_errors_are_one_line(url: str, message: str) -> None:
    output = bench("--remote", url, check=2).stderr
    errors = [line for line in output.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert message in errors[0]
