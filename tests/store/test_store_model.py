"""The manager compared with a plain dictionary, in random sequences of operations."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_helpers import make_entry, same

from kvmosaic.core.key import ChunkKey
from kvmosaic.store import ChunkStorageManager, DiskTier, HostTier, Tier

ONE = make_entry(0).nbytes
FILE = ONE + 1400
numbers = st.integers(0, 11)


class StoreMachine(RuleBasedStateMachine):
    """Entries differ in size. A second put has other data, so it would be noticed if a store took it. It may be taken
    if only a far tier has the entry, because a put does not wait for that tier's answer, and engines put the same
    data."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.pins: list[tuple[ChunkKey, ExitStack]] = []
        self.versions: dict[int, set[int]] = {}
        self.puts = 0

    @initialize(host=st.integers(0, 6), disk=st.none() | st.integers(0, 9))
    def open(self, host: int, disk: int | None) -> None:
        self.budget = host * ONE, None if disk is None else disk * FILE
        self.reopen()

    def reopen(self) -> None:
        host, disk = self.budget
        tiers: list[Tier] = [HostTier(host)]
        if disk is not None:
            tiers.append(DiskTier(self.root, disk))
        self.store = ChunkStorageManager(tiers)

    @rule(number=numbers)
    def put(self, number: int) -> None:
        entry = make_entry(number, tokens=4 * (1 + number % 3), version=self.puts)
        self.store.flush()
        there, near = self.store.contains(entry.key), self.store._stack.contains(entry.key, far=False)
        taken = self.store.put(entry)
        if there:
            assert taken
            if not near:
                self.versions[number].add(self.puts)
        elif taken:
            self.versions[number] = {self.puts}
        self.puts += 1
        if not taken:
            assert not self.store.contains(entry.key)

    @rule(number=numbers)
    def lookup(self, number: int) -> None:
        wanted = make_entry(number, tokens=4 * (1 + number % 3))
        there = self.store.contains(wanted.key)
        found, tier, reason = self.store.lookup(wanted.key, wanted.tokens, wanted.context)
        assert (found is not None) == there == (tier is not None) == (reason is None)
        if found is not None:
            put = [make_entry(number, tokens=4 * (1 + number % 3), version=each) for each in self.versions[number]]
            assert any(same(found, each) for each in put)

    @rule(number=numbers)
    def pin(self, number: int) -> None:
        key = make_entry(number, tokens=4 * (1 + number % 3)).key
        stack = ExitStack()
        stack.enter_context(self.store.pin([key]))
        self.pins.append((key, stack))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        _, stack = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        stack.close()

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert not list(self.store.scan())
        self.versions.clear()

    @rule()
    def empty_memory(self) -> None:
        self.store.flush()
        on_disk = {info.key for info in self.store.scan() if self.store._stack.tiers[-1].size(info.key)}
        self.store.empty_memory()
        assert {info.key for info in self.store.scan()} == (on_disk if self.budget[1] is not None else set())

    @precondition(lambda self: not self.pins)
    @rule()
    def restart(self) -> None:
        self.store.close()
        on_disk = {info.key for info in self.store.scan() if self.store._stack.known.size(-1, info.key)}
        has_disk = self.budget[1] is not None
        self.reopen()
        assert {info.key for info in self.store.scan()} == (on_disk if has_disk else set())

    @rule(number=numbers)
    def flood(self, number: int) -> None:
        """One-off entries fill the budgets, and pinned entries must survive them."""
        self.store.flush()
        tiers = self.store._stack.tiers
        pinned = [(tier, key) for tier in tiers for key, _ in self.pins if tier.size(key) is not None]
        for one_off in range(100, 108):
            self.store.put(make_entry(one_off + 10 * number))
        self.store.flush()
        assert all(tier.size(key) is not None for tier, key in pinned)

    @invariant()
    def within_budgets(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.flush()
        host, disk = self.budget
        assert sum(info.nbytes for info in self.store._stack.tiers[0].scan()) <= host
        assert sum(file.stat().st_size for file in self.root.rglob("*.safetensors")) <= (disk or 0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.folder.cleanup()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
