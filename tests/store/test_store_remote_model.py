"""The manager over a remote tier, compared with a plain dictionary, with the same random operations as over a
disk."""

from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from remote_servers import Mooncake, Valkey
from test_store_model import ONE, StoreMachine

from kvmosaic.store import ChunkStorageManager, HostTier
from kvmosaic.store.tiers.remote import open_remote_tier


class RemoteMachine(StoreMachine):
    """Host memory and a remote store that has no budget."""

    url: ClassVar[str]

    @initialize(host=st.integers(0, 6))
    def open(self, host: int) -> None:
        self.budget = host * ONE, 0
        self.reopen()
        self.store.clear()

    def reopen(self) -> None:
        self.store = ChunkStorageManager([HostTier(self.budget[0]), open_remote_tier(self.url, 5.0)])

    @invariant()
    def within_budgets(self) -> None:
        if hasattr(self, "store"):
            self.store.flush()
            assert sum(info.nbytes for info in self.store._stack.tiers[0].scan()) <= self.budget[0]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.clear()
        super().teardown()


class ValkeyMachine(RemoteMachine):
    """The machine on Valkey."""


class MooncakeMachine(RemoteMachine):
    """The machine on Mooncake."""


@pytest.fixture(autouse=True)
def addresses(request: pytest.FixtureRequest, one_mooncake_client: None) -> Iterator[None]:
    """Give each machine the address of its server. Only the needed server is started."""
    if request.cls is TestOnValkey:
        server: Valkey | Mooncake = request.getfixturevalue("valkey_server")
        ValkeyMachine.url = server.url
    else:
        server = request.getfixturevalue("mooncake_server")
        MooncakeMachine.url = server.url
    return


TestOnValkey = ValkeyMachine.TestCase
TestOnMooncake = MooncakeMachine.TestCase
TestOnValkey.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOnMooncake.settings = settings(TestOnValkey.settings, max_examples=10)
