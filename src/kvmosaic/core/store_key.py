"""An optional secret of engines that share a store. They only read entries that were written with the same secret."""

import hmac

from kvmosaic.core.secret import secret_from_environment

STORE_KEY_VARIABLE = "KVMOSAIC_STORE_KEY"
"""Environment variable of the secret."""
ID_BYTES = 6


class StoreKey:
    """Derives a key for each use, and a public id. Never shows the secret itself."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = self.derive("id")[:ID_BYTES].hex()
        """Public id, part of the fingerprints of entries: those with different store keys, or none, never mix."""

    def derive(self, use: str) -> bytes:
        """The key for one use."""
        return hmac.digest(self._secret, f"kvmosaic {use}".encode(), "sha256")

    @classmethod
    def from_environment(cls) -> "StoreKey | None":
        """The store key, if it is set. Raises a :class:`ConfigError` if it is too short."""
        secret = secret_from_environment(STORE_KEY_VARIABLE)
        return None if secret is None else cls(secret)
