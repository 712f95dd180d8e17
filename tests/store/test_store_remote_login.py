"""Valkey servers that require a password, or TLS."""

import shutil
import subprocess

import pytest

from kvmosaic.store.base import TierDownError
from kvmosaic.store.tiers.remote import open_remote_tier
from tests.store.remote_servers import Valkey
from tests.store.store_helpers import make_entry, same

PASSWORD = "KVMOSAIC_REMOTE_PASSWORD"


def keeps_an_entry(url):
    tier, entry = open_remote_tier(url, 5.0), make_entry(1)
    try:
        tier.put(entry)
        return same(tier.get(entry.key), entry)
    finally:
        tier.close()


def test_a_password_comes_from_the_environment(tmp_path, monkeypatch, caplog):
    server = Valkey(tmp_path, requirepass="sesame")
    try:
        monkeypatch.setenv(PASSWORD, "sesame")
        assert keeps_an_entry(server.url)
        for wrong in ("guessed", None):
            monkeypatch.delenv(PASSWORD) if wrong is None else monkeypatch.setenv(PASSWORD, wrong)
            with pytest.raises(TierDownError):
                keeps_an_entry(server.url)
    finally:
        server.kill()
    assert "WRONGPASS" in caplog.text
    assert "NOAUTH" in caplog.text
    assert f"{PASSWORD} sets the password" in caplog.text
    assert "guessed" not in caplog.text


def test_a_user_comes_with_the_url(tmp_path, monkeypatch):
    server = Valkey(tmp_path, user="engine on >secret ~* +@all")
    try:
        monkeypatch.setenv(PASSWORD, "secret")
        assert keeps_an_entry(server.url.replace("//", "//engine@"))
        with pytest.raises(TierDownError):
            keeps_an_entry(server.url.replace("//", "//nobody@"))
    finally:
        server.kill()


def test_tls_where_the_server_has_none(tmp_path, caplog):
    server = Valkey(tmp_path)
    try:
        with pytest.raises(TierDownError, match=r"no TLS .* check that the server uses TLS"):
            keeps_an_entry(server.url.replace("valkey:", "valkeys:"))
    finally:
        server.kill()
    assert "check that the server uses TLS" in caplog.text


def test_tls_with_an_authority_that_is_trusted_and_without(tmp_path, monkeypatch):
    assert shutil.which("openssl")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    tls = {"tls_cert_file": "cert.pem", "tls_key_file": "key.pem", "tls_auth_clients": "no"}
    server = Valkey(tmp_path, tls=True, **tls)
    try:
        with pytest.raises(TierDownError):
            keeps_an_entry(server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert keeps_an_entry(server.url)
    finally:
        server.kill()
