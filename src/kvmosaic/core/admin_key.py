"""The secret that allows clients to manage stored documents over HTTP."""

import base64
import hashlib
import hmac

from kvmosaic.core.secret import secret_from_environment

ADMIN_KEY_VARIABLE = "KVMOSAIC_CHUNK_ADMIN_KEY"
"""Environment variable of the secret."""
_SCHEME = "bearer "


class AdminKey:
    """Checks whether clients have the secret. Never shows the secret."""

    def __init__(self, secret: bytes) -> None:
        self._digest = hashlib.sha256(secret).digest()

    def opens(self, authorization: str | None) -> bool:
        """Whether the value of an ``Authorization`` header has the secret. The comparison takes constant time."""
        given = authorization or ""
        is_bearer = given[: len(_SCHEME)].lower() == _SCHEME
        secret = given[len(_SCHEME) :].strip().encode("latin-1", "backslashreplace")  # as servers decode headers
        return hmac.compare_digest(hashlib.sha256(secret).digest(), self._digest) and is_bearer

    def opens_for_browser(self, authorization: str | None) -> bool:
        """Whether the value of an ``Authorization`` header has the secret as a password, as browsers send it. The
        name of the user does not matter. The comparison takes constant time."""
        scheme, _, encoded = (authorization or "").partition(" ")
        try:
            given = base64.b64decode(encoded.strip(), validate=True)
        except ValueError:
            given = b""
        secret = given.partition(b":")[2]
        return hmac.compare_digest(hashlib.sha256(secret).digest(), self._digest) and scheme.lower() == "basic"

    @property
    def page_pass(self) -> str:
        """A text that only processes with the secret know. With it, the HTTP server asks the engine for reports that
        clients may not have."""
        return hmac.new(self._digest, b"reports for the page", hashlib.sha256).hexdigest()

    @classmethod
    def from_environment(cls) -> "AdminKey | None":
        """The key, if it is set. Raises a :class:`ConfigError` if it is too short."""
        secret = secret_from_environment(ADMIN_KEY_VARIABLE)
        return None if secret is None else cls(secret)
