"""Real remote stores for the tests that need one."""

from collections.abc import Iterator

import pytest
from remote_servers import Mooncake, Valkey

from kvmosaic.store.tiers.remote import RemoteTier, open_remote_tier

DEADLINE_S = 10.0
"""For tests that are not about deadlines, on machines that may be busy."""


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """Shared by the tests that leave it running."""
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    """Shared by the tests that leave it running."""
    server = Mooncake(tmp_path_factory.mktemp("mooncake"))
    yield server
    server.kill()


@pytest.fixture(params=["valkey", "mooncake"])
def server(request: pytest.FixtureRequest) -> Valkey | Mooncake:
    """Each kind of remote store in turn."""
    found: Valkey | Mooncake = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture
def tier(server: Valkey | Mooncake) -> Iterator[RemoteTier]:
    """An empty tier on it."""
    opened = open_remote_tier(server.url, DEADLINE_S)
    opened.delete_all([info.key for info in opened.scan()])
    yield opened
    opened.delete_all([info.key for info in opened.scan()])
    opened.close()
