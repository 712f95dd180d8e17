"""Random operations of two processes on one store, which are killed all the time (`python -m tests.store.soak`).

After each round, a new process's view of the store is compared with the facts that the two recorded: found entries
are those that were put, entries that were reported as lasting are there unless they were removed or evicted, and
removed entries are gone. Three kinds of rounds alternate: a shared directory with room for everything; a directory in
which each process has a quota that is far too small; and a remote store, which is also killed.
"""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.store.remote.resp import Connection
from kvmosaic.store.tiers.disk import INCOMING, SET_ASIDE
from tests import seeds
from tests.store.operations import ENTRIES, OWN, Ledger, Place, operate
from tests.store.remote_servers import Valkey
from tests.store.store_helpers import same

Kind = Literal["roomy", "tight", "remote"]
MILLION = 10**6
ROUND = 40_000
"""Number of operations that a process would do if it were not killed."""
ROOM = 2**30
TIGHT = 40_000
"""Bytes of about 20 entries."""
BYSTANDER = "nobody touches this tenant's"

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.store.operations"])


@dataclass
class Outcome:
    """Counts of operations and problems."""

    seed: int
    operations: int = 0
    found: int = 0
    kills: int = 0
    server_kills: int = 0
    rounds: int = 0
    kept: int = 0
    """Entries that had to be there after a round."""
    wrong: int = 0
    """Entries that were served and differ from those that were put."""
    lost: int = 0
    """Entries that had to be there and were not."""
    came_back: int = 0
    """Entries that came back after they were removed."""
    damaged: int = 0
    """Files that had to be set aside."""
    over_quota: int = 0
    """Times that a tenant had more than its quota."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return not (self.wrong or self.lost or self.came_back or self.damaged or self.over_quota)

    def __str__(self) -> str:
        numbers = {name: value for name, value in vars(self).items() if name not in ("notes", "seconds")}
        rows = [f"{name.replace('_', ' '):<14}{value:>12,}" for name, value in numbers.items()]
        return "\n".join([*rows, f"{'seconds':<14}{self.seconds:>12.0f}", *self.notes])


class Round:
    """Two processes over one place."""

    def __init__(
        self, kind: Kind, folder: Path, server: Valkey | None, outcome: Outcome, drawn: random.Random, most: int
    ) -> None:
        self._kind, self._server, self._most = kind, server, most
        self._outcome, self._random = outcome, drawn
        self._root = folder / "entries"
        self._server_died = False
        self._ledgers = [folder / f"ledger-{who}" for who in range(2)]
        remote = server.url if kind == "remote" and server is not None else None
        disk = {"roomy": ROOM, "tight": TIGHT, "remote": None}[kind]
        names = ["left", "right"] if kind == "tight" else ["both", "both"]
        self._places = [Place(self._root, disk, name, kind == "tight", remote) for name in names]
        self._bystanders = [Place(self._root, ROOM, BYSTANDER, False, None).entry(number) for number in range(3)]
        if kind == "tight":
            with_room = Place(self._root, ROOM, BYSTANDER, False, None).open()
            for entry in self._bystanders:
                with_room.put(entry)
            with_room.close()

    def run(self) -> None:
        """Start both processes, kill and restart each of them from time to time, and check the store at the end."""
        running = [self._start(who) for who in range(2)]
        kills = self._random.randrange(6, 14)
        for _ in range(kills):
            time.sleep(self._random.uniform(0.02, 0.5))
            who = self._random.randrange(2)
            self._kill(running[who])
            self._look_at_held(who)
            running[who] = self._start(who)
            if self._server is not None and self._random.random() < 0.3:
                self._server.kill()
                self._outcome.server_kills += 1
                self._server_died = True
                time.sleep(self._random.uniform(0, 0.3))
                self._server.start()
                _wait_until_loaded(self._server)
        for who, process in enumerate(running):
            if self._random.random() < 0.5:
                self._kill(process)
            else:
                process.join(300)
                if process.exitcode != 0:
                    raise AssertionError(f"a process of a {self._kind} round ended by itself: {process.exitcode}")
            self._look_at_held(who)
        self._look()

    def _start(self, who: int) -> BaseProcess:
        seed = self._random.randrange(2**31)
        process = _forks.Process(
            target=operate, args=(self._places[who], self._ledgers[who], who, seed, self._most), daemon=True
        )
        process.start()
        return process

    def _kill(self, process: BaseProcess) -> None:
        process.kill()
        process.join(60)
        self._outcome.kills += process.exitcode == -signal.SIGKILL

    def _look_at_held(self, who: int) -> None:
        """Check that entries which were pinned and lasting when the process ended are there: others may not evict
        them."""
        ledger, place = Ledger(self._ledgers[who]), self._places[who]
        ledger.end()
        if self._kind == "tight":
            store = Place(self._root, ROOM, place.tenant, True, None).open()
            taken = sum(info.nbytes for info in store.scan())
            self._outcome.over_quota += taken > TIGHT
            for number in range(ENTRIES):
                if ledger.held[number] > ledger.cleared[number]:
                    self._must_be_there(store.contains(place.entry(number).key), f"pinned, {number}")
            store.close()
        ledger.held[:] = 0.0

    def _look(self) -> None:
        """Check all entries, as a new process finds them."""
        ledgers = [Ledger(path) for path in self._ledgers]
        for who, (ledger, place) in enumerate(zip(ledgers, self._places, strict=True)):
            store = place.open()
            for number in range(ENTRIES):
                wanted = place.entry(number)
                found = store.lookup(wanted.key, wanted.tokens, wanted.context).entry
                self._outcome.found += found is not None
                self._outcome.wrong += found is not None and not same(found, wanted)
                if self._kind != "tight":
                    kept = max(each.kept[number] for each in ledgers) > max(each.cleared[number] for each in ledgers)
                    if kept and who == 0:
                        self._must_be_there(found is not None, f"kept, {number}")
                is_own = self._kind == "tight" or number // OWN == who
                # Nothing can be removed from a server that is down.
                if is_own and ledger.gone[number] and found is not None and not self._server_died:
                    self._outcome.came_back += 1
                    self._outcome.notes.append(f"came back in a {self._kind} round: {number}")
            store.close()
        if self._kind == "tight":
            bystander = Place(self._root, ROOM, BYSTANDER, False, None).open()
            for entry in self._bystanders:
                self._must_be_there(bystander.contains(entry.key), "another tenant's")
            bystander.close()
        for ledger in ledgers:
            operations, found, wrong = ledger.counts
            self._outcome.operations += operations
            self._outcome.found += found
            self._outcome.wrong += wrong
        self._outcome.damaged += sum(path.is_file() for path in (self._root / SET_ASIDE).rglob("*"))
        # Half-written files of killed writers are removed after an hour, and never read.
        for path in (self._root / INCOMING).glob("*"):
            path.unlink()

    def _must_be_there(self, is_there: bool, what: str) -> None:
        self._outcome.kept += 1
        self._outcome.lost += not is_there
        if not is_there:
            self._outcome.notes.append(f"lost in a {self._kind} round: {what}")


def _wait_until_loaded(server: Valkey) -> None:
    """Wait for the server, which listens before it has read its data."""
    end = time.monotonic() + 30
    while not _has_loaded(server):
        assert time.monotonic() < end, "the server does not come back"
        time.sleep(0.1)


def _has_loaded(server: Valkey) -> bool:
    try:
        connection = Connection(RemoteUrl.parse(server.url), 5)
        connection.send([("DBSIZE",)])
        connection.reply()
        connection.close()
    except OSError:
        return False
    return True


def soak(
    operations: int = MILLION,
    seed: int = seeds.SESSION,
    kinds: tuple[Kind, ...] | None = None,
    most: int = ROUND,
) -> Outcome:
    """Run rounds until the number of operations is reached. A process does at most ``most`` operations."""
    outcome, drawn, begin = Outcome(seed), random.Random(seed), time.monotonic()
    has_server = bool(shutil.which("valkey-server") or shutil.which("redis-server"))
    kinds = kinds or (("roomy", "tight", "roomy", "tight", "remote") if has_server else ("roomy", "tight"))
    with tempfile.TemporaryDirectory(prefix="kvmosaic-store-soak-") as folder:
        for number, kind in enumerate(itertools.cycle(kinds)):
            here = Path(folder) / f"{number}"
            here.mkdir()
            server = Valkey(here, persistent=True) if kind == "remote" else None
            try:
                Round(kind, here, server, outcome, drawn, most).run()
            finally:
                if server is not None:
                    server.kill()
            shutil.rmtree(here)
            outcome.rounds += 1
            if outcome.operations >= operations:
                break
    outcome.seconds = time.monotonic() - begin
    return outcome


def main() -> None:
    """A million operations, or fewer if `make soak` is to take less than half an hour."""
    share = min(1.0, float(os.environ.get("SOAK_MINUTES", 30)) / 30)
    outcome = soak(int(MILLION * share))
    print(outcome)
    raise SystemExit(0 if outcome.is_right else 1)


if __name__ == "__main__":
    main()
