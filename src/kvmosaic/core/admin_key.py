"""The secret of those who may look after stored documents over HTTP."""

import hashlib
import hmac
import os

from kvmosaic.core.errors import ConfigError

ADMIN_KEY_VARIABLE = "KVMOSAIC_CHUNK_ADMIN_KEY"
"""From the environment alone, like passwords: settings are logged, and process lists show arguments."""
LEAST_BYTES = 16
_SCHEME = "bearer "


class AdminKey:
    """Tells those who have the secret from others. Never shows it."""

    def __init__(self, secret: bytes) -> None:
        self._digest = hashlib.sha256(secret).digest()

    def opens(self, authorization: str | None) -> bool:
        """Whether the value of an ``Authorization`` header has the secret. Takes as long whatever it says."""
        given = authorization or ""
        is_bearer = given[: len(_SCHEME)].lower() == _SCHEME
        secret = given[len(_SCHEME) :].strip().encode(errors="surrogateescape")
        return hmac.compare_digest(hashlib.sha256(secret).digest(), self._digest) and is_bearer

    @classmethod
    def from_environment(cls) -> "AdminKey | None":
        """The key, if there is one; raises a :class:`ConfigError` if it is too short."""
        text = os.environ.get(ADMIN_KEY_VARIABLE)
        if text is None:
            return None
        secret = text.encode(errors="surrogateescape")
        if len(secret) < LEAST_BYTES:
            raise ConfigError(
                f"{ADMIN_KEY_VARIABLE}: {len(secret)} bytes are too few; set at least {LEAST_BYTES}, such as "
                "`openssl rand -hex 32` prints, or unset it"
            )
        return cls(secret)
