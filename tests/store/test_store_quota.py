"""Tenants that share a directory, each within its quota."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_helpers import make_entry

from kvmosaic.core.config import load_config
from kvmosaic.core.entry import ChunkKV
from kvmosaic.core.key import ChunkKey
from kvmosaic.store import ChunkStorageManager, open_store, stack

FILE = make_entry(0).nbytes + 1400
TENANTS = ("a", "b")


def open_for(root: Path, tenant: str, quota: int | None) -> ChunkStorageManager:
    return open_store(load_config(disk_path=root, tenant=tenant, tenant_quota=quota, host_memory=0))


def nbytes_of(root: Path, tenant: str) -> int:
    return sum(file.stat().st_size for file in (root / tenant).rglob("*.safetensors"))


def entry_of(tenant: str, number: int) -> ChunkKV:
    return make_entry(number, tokens=4 * (1 + number % 3), tenant=tenant)


class QuotaMachine(RuleBasedStateMachine):
    """A process for each of two tenants, in turns. A tenant's stored entries change only by its own operations."""

    @initialize(quotas=st.tuples(st.integers(0, 9), st.integers(0, 9)))
    def open(self, quotas: tuple[int, int]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name)
        self.quotas = {tenant: quota * FILE for tenant, quota in zip(TENANTS, quotas, strict=True)}
        self.stores = {tenant: open_for(self.root, tenant, quota) for tenant, quota in self.quotas.items()}
        self.stored: dict[str, set[Path]] = {tenant: set() for tenant in TENANTS}

    def note(self, tenant: str) -> None:
        self.stores[tenant].flush()
        self.stored[tenant] = set((self.root / tenant).rglob("*.safetensors"))

    @rule(tenant=st.sampled_from(TENANTS), numbers=st.lists(st.integers(0, 30), min_size=1, max_size=12))
    def put(self, tenant: str, numbers: list[int]) -> None:
        for number in numbers:
            self.stores[tenant].put(entry_of(tenant, number))
        self.note(tenant)

    @rule(tenant=st.sampled_from(TENANTS), number=st.integers(0, 30))
    def look_up(self, tenant: str, number: int) -> None:
        entry = entry_of(tenant, number)
        self.stores[tenant].lookup(entry.key, entry.tokens, entry.context)

    @rule(tenant=st.sampled_from(TENANTS))
    def restart(self, tenant: str) -> None:
        self.stores[tenant].close()
        self.stores[tenant] = open_for(self.root, tenant, self.quotas[tenant])

    @rule(tenant=st.sampled_from(TENANTS))
    def clear(self, tenant: str) -> None:
        self.stores[tenant].clear()
        self.note(tenant)

    @precondition(lambda self: hasattr(self, "stores"))
    @invariant()
    def each_within_its_quota_and_left_alone(self) -> None:
        for tenant in TENANTS:
            assert nbytes_of(self.root, tenant) <= self.quotas[tenant]
            assert set((self.root / tenant).rglob("*.safetensors")) == self.stored[tenant]

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            for store in self.stores.values():
                store.close()
            self.folder.cleanup()


TestQuota = pytest.mark.slow(QuotaMachine.TestCase)
TestQuota.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@pytest.fixture
def stock_is_always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "STOCK_SECONDS", 0.0)
    monkeypatch.setattr(stack, "STOCK_SHARE", float("inf"))


@pytest.mark.usefixtures("stock_is_always_due")
def test_two_processes_of_one_tenant_share_its_quota(tmp_path: Path) -> None:
    stores = [open_for(tmp_path, "a", 5 * FILE) for _ in range(2)]
    for number in range(30):
        store = stores[number % 2]
        store.put(make_entry(number, tenant="a"))
        store.flush()
        assert nbytes_of(tmp_path, "a") <= 5 * FILE


@pytest.mark.usefixtures("stock_is_always_due")
def test_what_another_process_deleted_no_longer_counts(tmp_path: Path) -> None:
    ours, other = (open_for(tmp_path, "a", 5 * FILE) for _ in range(2))
    for entry in (make_entry(number, tenant="a") for number in range(5)):
        ours.put(entry)
        ours.flush()
        ours.lookup(entry.key, entry.tokens, entry.context)  # otherwise it would be evicted first
    other.clear()
    other.flush()
    for number in range(10, 15):
        ours.put(make_entry(number, tenant="a"))
    ours.flush()
    assert all(ours.contains(make_entry(number, tenant="a").key) for number in range(10, 15))


def test_without_a_quota_the_oldest_go_whoever_they_belong_to(tmp_path: Path) -> None:
    theirs = open_for(tmp_path, "b", None)
    theirs.put(make_entry(0, tenant="b"))
    theirs.close()
    ours = open_store(load_config(disk_path=tmp_path, tenant="a", disk_space=FILE, host_memory=0))
    ours.put(make_entry(1, tenant="a"))
    ours.flush()
    assert nbytes_of(tmp_path, "b") == 0


def test_a_quota_is_no_more_than_the_disk_space() -> None:
    assert load_config(disk_space="1MiB", tenant_quota="2MiB").disk_budget == 2**20
    assert load_config(disk_space="2MiB", tenant_quota="1MiB").disk_budget == 2**20


def test_what_is_there_when_a_store_is_opened_counts(tmp_path: Path) -> None:
    store = open_for(tmp_path, "a", 10 * FILE)
    for number in range(8):
        store.put(make_entry(number, tenant="a"))
    store.close()
    store = open_for(tmp_path, "a", 3 * FILE)
    assert nbytes_of(tmp_path, "a") > 3 * FILE  # opening evicts nothing
    new: ChunkKey = make_entry(99, tenant="a").key
    store.put(make_entry(99, tenant="a"))
    store.flush()
    assert nbytes_of(tmp_path, "a") <= 3 * FILE
    assert store.contains(new)
