"""The secret that engines which share a store may have: with it nobody else can write what they will read."""

import hmac

from kvmosaic.core.secret import secret_from_environment

STORE_KEY_VARIABLE = "KVMOSAIC_STORE_KEY"
"""Where the secret is."""
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
        secret = secret_from_environment(STORE_KEY_VARIABLE)
        return None if secret is None else cls(secret)
