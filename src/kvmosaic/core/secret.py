"""Secrets: from the environment alone, like passwords. Settings are logged, and process lists show arguments."""

import os

from kvmosaic.core.errors import ConfigError

LEAST_BYTES = 16
"""Bytes of the shortest secret."""


def secret_from_environment(variable: str) -> bytes | None:
    """What ``variable`` says, if it is set; raises a :class:`ConfigError` if that is too short."""
    text = os.environ.get(variable)
    if text is None:
        return None
    secret = text.encode(errors="surrogateescape")
    if len(secret) < LEAST_BYTES:
        raise ConfigError(
            f"{variable}: {len(secret)} bytes are too few; set at least {LEAST_BYTES}, such as "
            "`openssl rand -hex 32` prints, or unset it"
        )
    return secret
