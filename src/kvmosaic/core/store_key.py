"""The secret that engines which share a store may have: with it nobody else can write what they will read."""

import hmac
import os

from kvmosaic.core.errors import ConfigError

STORE_KEY_VARIABLE = "KVMOSAIC_STORE_KEY"
"""From the environment alone, like passwords: settings are logged, and process lists show arguments."""
LEAST_BYTES = 16
ID_BYTES = 6


class StoreKey:
    """Makes other keys, one for each use, and a name that may be seen. Never shows the secret itself."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = self.derive("id")[:ID_BYTES].hex()
        """Part of the fingerprints of entries: those with different store keys, or none, never meet."""

    def derive(self, use: str) -> bytes:
        """The key for one use."""
        return hmac.digest(self._secret, f"kvmosaic {use}".encode(), "sha256")

    @classmethod
    def from_environment(cls) -> "StoreKey | None":
        """The store key, if there is one; raises a :class:`ConfigError` if it is too short."""
        text = os.environ.get(STORE_KEY_VARIABLE)
        if text is None:
            return None
        secret = text.encode(errors="surrogateescape")
        if len(secret) < LEAST_BYTES:
            raise ConfigError(
                f"{STORE_KEY_VARIABLE}: {len(secret)} bytes are too few; set at least {LEAST_BYTES}, such as "
                "`openssl rand -hex 32` prints, or unset it"
            )
        return cls(secret)
