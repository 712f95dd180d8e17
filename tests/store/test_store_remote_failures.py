"""Remote stores that die, hang and recover: answers are always right, reasons are counted, and at most one deadline
is lost."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remote_servers import Mooncake, Valkey, free_port, need_mooncake
from store_helpers import make_entry, same

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.store import ChunkStorageManager, LookupResult, MissReason, open_store
from kvmosaic.store.breaker import Breaker

pytestmark = pytest.mark.slow
DEADLINE_MS = 1000
PATIENCE_S = DEADLINE_MS / 1000 + 0.8
"""A deadline, and the time that a busy machine may add to it."""


def find(store: ChunkStorageManager, entry: ChunkKV) -> LookupResult:
    return store.lookup(entry.key, entry.tokens, entry.context)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def until(condition: Callable[[], bool], patience_s: float = 20) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.1)


@pytest.fixture(params=["valkey", "mooncake"])
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Valkey | Mooncake]:
    """A server of a single test, which may do anything with it."""
    server = Valkey(tmp_path) if request.param == "valkey" else Mooncake(tmp_path)
    yield server
    close_all()
    server.kill()


_opened: list[ChunkStorageManager] = []


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Close the tiers and stores that a test opened, with or without their server."""
    yield
    close_all()


def close_all() -> None:
    while _opened:
        _opened.pop().close()


def opened(url: str) -> ChunkStorageManager:
    _opened.append(open_store(load_config(remote=url, remote_deadline_ms=DEADLINE_MS)))
    return _opened[-1]


def filled(url: str, count: int = 8) -> ChunkStorageManager:
    """A new store, with nothing in host memory and ``count`` entries in the remote tier."""
    writer = opened(url)
    for number in range(count):
        assert writer.put(make_entry(number))
    writer.close()
    assert writer.get_stats()["write_errors"] == 0
    return opened(url)


def test_a_store_that_dies_costs_a_fetch_one_deadline(
    mortal: Valkey | Mooncake, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(mortal.url)
    keys = [make_entry(number).key for number in range(8)]
    store.fetch(keys[:2])
    with caplog.at_level(logging.WARNING, "kvmosaic"):
        mortal.server.pause()
        assert seconds(lambda: store.fetch(keys)) < PATIENCE_S
    assert len(caplog.records) == 1, caplog.text
    assert [find(store, make_entry(number)).tier for number in range(2)] == ["remote"] * 2
    assert {find(store, make_entry(number)).reason for number in range(2, 8)} == {MissReason.ERROR}
    mortal.server.resume()
    until(lambda: find(store, make_entry(2)).tier == "remote")


def test_what_never_began_to_arrive_is_not_waited_for_longer(mortal: Valkey | Mooncake) -> None:
    """This holds even if its size is known to be large."""
    large = [make_entry(number, tokens=2048, heads=8, layers=14, k_dim=64, v_dim=64) for number in range(2)]
    writer, reader = opened(mortal.url), opened(mortal.url)
    for entry in large:
        assert writer.put(entry)
    writer.close()
    reader.fetch([large[0].key])
    assert find(reader, large[0]).tier == "remote"
    mortal.server.pause()
    assert seconds(lambda: reader.fetch([large[1].key])) < PATIENCE_S
    assert find(reader, large[1]).reason is MissReason.ERROR
    mortal.server.resume()


@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_a_dead_store_costs_one_deadline_once(
    mortal: Valkey | Mooncake, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(mortal.url)
    assert find(store, make_entry(0)).tier == "remote"
    with caplog.at_level(logging.WARNING, "kvmosaic"):
        if how == "killed":
            mortal.server.kill()
        else:
            mortal.server.pause()
        assert seconds(lambda: find(store, make_entry(1))) < PATIENCE_S
        # No other call waits: 6, 12 and 100 of them take less than one deadline.
        assert seconds(lambda: [find(store, make_entry(number)) for number in range(2, 8)]) < DEADLINE_MS / 1000
        assert seconds(lambda: [store.put(make_entry(number)) for number in range(8, 20)]) < DEADLINE_MS / 1000
        assert seconds(lambda: store.absent(make_entry(number).key for number in range(100))) < DEADLINE_MS / 1000
        store.flush()
    assert len(caplog.records) == 1, caplog.text
    stats = store.get_stats()
    assert stats["misses_by_reason"]["error"] == 7
    assert stats["write_errors"] == 12
    for number in (0, *range(8, 20)):
        found = find(store, make_entry(number))
        assert found.tier == "host"
        assert found.entry is not None
        assert same(found.entry, make_entry(number))
    if how == "hanging":
        mortal.server.resume()
        until(lambda: find(store, make_entry(1)).tier == "remote")
    assert seconds(store.close) < 10


def test_a_restart_of_everything_loses_entries_at_most(mortal: Valkey | Mooncake) -> None:
    store = filled(mortal.url)
    mortal.kill()
    mortal.start()
    until(lambda: find(store, make_entry(1)).reason is MissReason.NEW)
    store.put(make_entry(1))
    store.flush()
    until(lambda: find(opened(mortal.url), make_entry(1)).tier == "remote")


def test_a_restart_between_two_calls_is_not_even_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Valkey(tmp_path, persistent=True)
    store = filled(server.url)
    assert find(store, make_entry(0)).tier == "remote"
    server.kill()
    server.start()
    with caplog.at_level(logging.WARNING):
        assert [find(store, make_entry(number)).tier for number in range(1, 8)] == ["remote"] * 7
    assert not caplog.records
    server.kill()


def test_a_restarted_valkey_that_kept_its_data_is_used_again(tmp_path: Path) -> None:
    server = Valkey(tmp_path, persistent=True)
    store = filled(server.url)
    server.kill()
    assert find(store, make_entry(1)).reason is MissReason.ERROR
    server.start()
    until(lambda: find(store, make_entry(1)).tier == "remote")
    server.kill()


def test_a_mooncake_master_that_forgot_its_keys(tmp_path: Path) -> None:
    """Only the master is restarted, and the holder joins it again by itself."""
    server = Mooncake(tmp_path)
    store = filled(server.url)
    server.server.kill()
    assert find(store, make_entry(1)).reason is MissReason.ERROR
    server.server.start()
    until(lambda: find(store, make_entry(1)).reason is MissReason.NEW)

    def is_stored_again() -> bool:
        store.clear()
        store.put(make_entry(1))
        store.flush()
        return find(opened(server.url), make_entry(1)).tier == "remote"

    until(is_stored_again)
    server.kill()


def test_a_dead_holder(tmp_path: Path) -> None:
    """The master still names it for a while, so reads fail although lookups succeed."""
    believed_s = 3
    server = Mooncake(tmp_path, client_ttl=believed_s)
    store = filled(server.url)
    server.holder.kill()
    times = [seconds(lambda number=number: find(store, make_entry(number))) for number in range(8)]
    assert max(times) < PATIENCE_S
    assert store.get_stats()["misses_by_reason"]["error"] == 8
    time.sleep(believed_s + 2)
    server.holder.start()
    fresh = opened(server.url)
    assert find(fresh, make_entry(1)).entry is None
    fresh.put(make_entry(1))
    fresh.flush()
    until(lambda: find(opened(server.url), make_entry(1)).tier == "remote")
    server.kill()


@pytest.mark.parametrize("url", ["valkey://127.0.0.1:{}", "mooncake://127.0.0.1:{}?metrics_port=1"])
def test_a_store_that_is_down_at_start_stops_nobody(url: str, caplog: pytest.LogCaptureFixture) -> None:
    if url.startswith("mooncake"):
        need_mooncake()
    with caplog.at_level(logging.WARNING, "kvmosaic"):
        start = time.perf_counter()
        store = opened(url.format(free_port()))
        assert store.put(make_entry(1))
        assert find(store, make_entry(1)).tier == "host"
        assert find(store, make_entry(2)).reason is MissReason.ERROR
        assert time.perf_counter() - start < 2 * PATIENCE_S
        store.close()
    assert len(caplog.records) == 1, caplog.text
    assert "cannot be used" in caplog.text


def test_a_store_that_comes_up_later_is_used(tmp_path: Path) -> None:
    server = Valkey(tmp_path)
    server.kill()
    store = opened(server.url)
    server.start()
    store.put(make_entry(1))
    store.flush()

    def is_stored() -> bool:
        store.put(make_entry(2))
        store.clear(lambda key: key == make_entry(2).key)
        store.put(make_entry(2))
        store.flush()
        return find(opened(server.url), make_entry(2)).tier == "remote"

    until(is_stored)
    server.kill()


def test_something_else_listens_there(tmp_path: Path) -> None:
    """The other program greets like a mail server."""
    import socketserver

    class Mail(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"220 mail.example.org ESMTP\r\n")
            self.request.recv(1000)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        store = opened(f"valkey://127.0.0.1:{listener.server_address[1]}")
        assert find(store, make_entry(1)).reason is MissReason.ERROR
        listener.shutdown()


def test_kills_in_the_middle_of_everything(tmp_path: Path) -> None:
    """Four threads put and read while the server dies again and again."""
    server = Valkey(tmp_path, persistent=True)
    config = load_config(remote=server.url, remote_deadline_ms=DEADLINE_MS, host_memory=3 * make_entry(0).nbytes)
    store = open_store(config)
    wrong: list[int] = []
    hits: list[str] = []
    ended = threading.Event()

    def work(seed: int) -> None:
        step = seed
        while not ended.is_set():
            step += 7
            entry = make_entry(step % 40)
            found = find(store, entry)
            if found.entry is None:
                store.put(entry)
            elif same(found.entry, entry):
                hits.append(str(found.tier))
            else:
                wrong.append(step)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(1.2)
        server.kill()
        server.start()
    time.sleep(1.5)
    ended.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not wrong
    assert "remote" in hits
    assert store.get_stats()["corrupt_set_aside"] == 0
    store.close()
    server.kill()


def test_a_program_that_forgets_to_close_still_writes(mortal: Valkey | Mooncake) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from store_helpers import make_entry\n"
        "from kvmosaic.core.config import load_config\n"
        "from kvmosaic.store import open_store\n"
        f"store = open_store(load_config(remote={mortal.url!r}, remote_deadline_ms=10_000))\n"
        "for number in range(30): store.put(make_entry(number, tokens=2000))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    store = open_store(load_config(remote=mortal.url, remote_deadline_ms=10_000))
    entries = [make_entry(number, tokens=2000) for number in range(30)]
    assert [find(store, entry).tier for entry in entries] == ["remote"] * 30
    store.close()


def test_the_breaker_tries_less_often_what_keeps_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmosaic.store.breaker.FIRST_PAUSE_S", 0.05)
    probes: list[float] = []
    breaker = Breaker("it", 1.0, probe=lambda: probes.append(time.monotonic()), harmless=())

    def fail() -> None:
        raise OSError("broken")

    pauses = []
    for number in range(1, 5):
        start = time.monotonic()
        with pytest.raises(OSError, match="broken"):
            breaker.call(fail)
        until(lambda number=number: len(probes) == number and breaker._down is None)
        pauses.append(probes[-1] - start)
    assert pauses[-1] > 0.3 > 0.2 > pauses[0]
    assert breaker.call(lambda: 7) == 7


def test_closing_waits_for_calls_that_were_left_behind(tmp_path: Path) -> None:
    """If Mooncake's client was closed while one of its calls was still waiting for a hanging master, the process
    ended."""
    server = Mooncake(tmp_path)
    for _ in range(3):
        store = open_store(load_config(remote=server.url, remote_deadline_ms=DEADLINE_MS))
        store.put(make_entry(1))
        store.flush()
        server.server.pause()
        assert find(store, make_entry(2)).reason is MissReason.ERROR  # its call goes on
        resuming = threading.Timer(1.0, server.server.resume)
        resuming.start()
        store.close()
        resuming.join()  # otherwise it may resume the server during the next round's lookup
    server.kill()
