"""Real remote stores for the tests that need one."""

from collections.abc import Iterator
from typing import Any

import pytest
from remote_servers import DEADLINE_S, Mooncake, Valkey

from kvmosaic.core.remote_url import RemoteUrl
from kvmosaic.store.remote import mooncake
from kvmosaic.store.tiers.remote import RemoteTier, open_remote_tier


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


class _Kept:
    """A client of Mooncake's library that stays open when a store closes it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def one_mooncake_client() -> Iterator[None]:
    """One client for tests that open many stores and are not about clients, because closing a client takes a
    second."""
    clients: dict[RemoteUrl, Any] = {}

    def connect(library: Any, url: RemoteUrl, patience_s: float) -> _Kept:
        if url not in clients:
            clients[url] = really(library, url, patience_s)
        return _Kept(clients[url])

    really = mooncake.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mooncake, "connect", connect)
        yield
    for client in clients.values():
        client.close()
