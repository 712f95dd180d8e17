"""Access to stored documents over HTTP, and the handling of requests. There is no engine."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest

from kvmosaic.core.admin_key import ADMIN_KEY_VARIABLE, AdminKey
from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.sources import find_sources
from kvmosaic.engines.vllm.http.admin import MAX_BODY, AdminApp

KEY = "a secret of many letters"
BEARER = {"Authorization": f"Bearer {KEY}"}
HASH = "0" * 32


class Client:
    """Records the methods of workers that are called."""

    def __init__(self):
        self.called = []

    async def collective_rpc(self, method, args=()):
        self.called.append((method, *args))
        return [0]


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def ask(client, smollm2_folder):
    """Ask the application as a server does."""
    model = SimpleNamespace(model="tiny", max_model_len=100, tokenizer=str(smollm2_folder), tokenizer_revision=None)
    model.trust_remote_code = model.skip_tokenizer_init = False
    model.hf_text_config = SimpleNamespace(bos_token_id=1)
    transfer = SimpleNamespace(kv_connector_extra_config={"enable_chunk_cache": True, "min_chunk_tokens": 8})
    config = SimpleNamespace(model_config=model, kv_transfer_config=transfer)
    state = SimpleNamespace(vllm_config=config, engine_client=client)
    admin = AdminApp(AdminKey(KEY.encode()))

    async def served(scope, receive, send):
        await admin({**scope, "app": SimpleNamespace(state=state)}, receive, send)

    def ask(method, path, headers=BEARER, **sent):
        async def asked():
            transport = httpx.ASGITransport(served)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as browser:
                return await browser.request(method, path, headers=headers, **sent)

        return asyncio.run(asked())

    ask.settings = transfer.kv_connector_extra_config
    return ask


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": KEY},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": "Bearer "},
        {"Authorization": b"Bearer \xff\xfe"},
        {"X-Api-Key": KEY},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "documents"), ("DELETE", "documents"), ("POST", "nonsense")])
def test_without_the_key_nothing_is_told_and_nothing_done(ask, client, headers, method, path):
    answer = ask(method, f"/kvmosaic/{path}", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json() == {"error": "the admin key is missing or wrong"}
    assert client.called == []


def test_the_scheme_may_be_written_in_any_case(ask):
    for scheme in ("Bearer", "bearer", "BEARER"):
        answer = ask("DELETE", f"/kvmosaic/documents/{HASH}", headers={"Authorization": f"{scheme} {KEY}"})
        assert answer.status_code == 404
        assert answer.json() == {"error": f"nothing is stored under {HASH}"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "", 404),
        ("GET", "documents/" + HASH, 404),
        ("PUT", "documents", 404),
        ("POST", f"documents/{HASH}/burn", 404),
        ("POST", f"documents/{HASH}/pin/pin", 404),
        ("POST", "documents/nohash/pin", 422),
        ("DELETE", "documents/", 422),  # an empty variable, as in a script
        ("DELETE", "documents//", 404),
        ("GET", "documents/", 404),
        ("DELETE", "documents/" + "F" * 32, 422),
        ("DELETE", "documents/" + "0" * 33, 422),
        ("GET", "documents?limit=-1", 422),
        ("GET", "documents?limit=1e3", 422),
        ("GET", "documents?limit=" + "9" * 1000, 422),
        ("GET", "documents?text=1", 403),
    ],
)
def test_what_makes_no_sense_reaches_no_worker(ask, client, method, path, status):
    answer = ask(method, f"/kvmosaic/{path}")
    assert answer.status_code == status
    assert len(answer.json()["error"]) < 300
    assert client.called == []


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"text"', b'{"text": 5}', b'{"text": ""}', b'{"text": "  "}', b"[" * 100_000, b"\xff"),
        b'{"text": "half of a character \\ud800 in a text that is long enough for a document"}',
    ],
)
@pytest.mark.parametrize("path", ["documents", "documents/delete"])
def test_bodies_that_name_no_text(ask, client, path, body):
    answer = ask("POST", f"/kvmosaic/{path}", content=body)
    assert (answer.status_code, answer.json()) == (422, {"error": 'the body must be {"text": "…"}'})
    assert client.called == []


def test_a_body_is_not_read_beyond_its_limit(ask):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 2**20
            yield b"x" * 2**20

    answer = ask("POST", "/kvmosaic/documents", content=endless())
    assert answer.status_code == 413
    assert sent <= MAX_BODY + 2 * 2**20


def test_a_document_that_is_too_short_and_one_that_is_too_long(ask, client):
    assert ask("POST", "/kvmosaic/documents", json={"text": "Two words."}).status_code == 422
    assert client.called == []
    long = ask("POST", "/kvmosaic/documents", json={"text": "All work and no play makes a dull day. " * 20})
    assert long.status_code == 422
    assert "100" in long.json()["error"]
    assert [call[0] for call in client.called] == ["chunk_cache_holds"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"chunk_context": "system"}, "chunk_context"),
        ({"miss_policy": "never"}, "miss_policy"),
        ({"client_parameters": "none", "chunk_sources": "none"}, "client_parameters"),
    ],
)
def test_settings_with_which_nothing_can_be_filled(ask, settings, word):
    ask.settings.update(settings)
    answer = ask("POST", "/kvmosaic/documents", json={"text": "The harbour was built by hand in the winter of 1840."})
    assert answer.status_code == 409
    assert word in answer.json()["error"]


def test_what_fails_is_said_in_one_line_and_in_the_log(ask, client, caplog):
    async def fail(method, args=()):
        raise RuntimeError("secret details")

    client.collective_rpc = fail
    answer = ask("GET", "/kvmosaic/documents")
    assert answer.status_code == 500
    assert "secret" not in answer.text


# --- the key


def test_the_application_is_there_only_with_a_key(monkeypatch):
    monkeypatch.delenv(ADMIN_KEY_VARIABLE, raising=False)
    assert AdminApp.from_environment() is None
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)
    assert AdminApp.from_environment() is not None


def test_a_short_key_is_refused_wherever_settings_are_read(monkeypatch):
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match=f"{ADMIN_KEY_VARIABLE}: 5 bytes are too few"):
        load_config()


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", f"{KEY}\r"])
def test_a_key_with_blanks_around_it_is_refused(monkeypatch, key):
    """No header could contain such a key."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=f"{ADMIN_KEY_VARIABLE}: begins or ends with white space") as caught:
        load_config()
    assert KEY not in str(caught.value)


def test_a_text_is_deleted_in_every_spelling(ask, client):
    text = 'The "Ilse" calls at every pier.\nShe was built in 1911, and is painted gr\u00fcn and white.'
    assert ask("POST", "/kvmosaic/documents/delete", json={"text": text}).status_code == 404
    assert [method for method, *_ in client.called] == ["chunk_cache_delete"] * 3
    assert len(set(client.called)) == 3


def deleted(ask, client, text):
    """The entries that are deleted for a text."""
    client.called.clear()
    assert ask("POST", "/kvmosaic/documents/delete", json={"text": text}).status_code == 404
    return {digest for _, digest in client.called}


@pytest.mark.parametrize("label", ["[1] ", "Source 1: ", "\n\n**Document 5:** ", '<document index="8">\n'])
def test_a_text_with_a_label_deletes_what_the_labelled_part_made(ask, client, label):
    text = 'The "Ilse" calls at every pier.\nShe was built in 1911, and is painted grey and white.'
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": f"{label}{text}"}, "Why?"]}]}
    [named] = find_sources(body, ["parts"]).documents
    assert deleted(ask, client, named) == deleted(ask, client, text)
    assert deleted(ask, client, f"{label}{text}") > deleted(ask, client, named)


def test_a_label_without_a_document_is_refused_in_one_line(ask, client):
    answer = ask("POST", "/kvmosaic/documents/delete", json={"text": "Source 1: "})
    assert answer.status_code == 422
    assert client.called == []


def test_the_key_is_no_setting_and_is_never_shown(monkeypatch):
    with pytest.raises(ConfigError, match=f"environment variable {ADMIN_KEY_VARIABLE}") as caught:
        load_config(chunk_admin_key=KEY)
    assert KEY not in str(caught.value)
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)
    config = load_config()
    assert KEY not in json.dumps(config.model_dump(mode="json")) + repr(config)
    assert KEY not in repr(vars(AdminKey(KEY.encode())))


def test_a_key_may_have_any_letters():
    """Servers decode headers as Latin-1, whatever their encoding is."""
    key = "ein Schlüssel aus vielen Wörtern".encode()
    assert AdminKey(key).opens(f"Bearer {key.decode('latin-1')}")
    assert not AdminKey(key).opens("Bearer ein Schl\u20acssel aus vielen Wörtern")
