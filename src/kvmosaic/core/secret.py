"""Secrets, which come only from the environment: settings are logged, and process lists show arguments."""

import os

from kvmosaic.core.errors import ConfigError

LEAST_BYTES = 16
"""Minimum length of a secret, in bytes."""


def secret_from_environment(variable: str) -> bytes | None:
    """The value of ``variable``, if it is set. Raises a :class:`ConfigError` if the value is too short
    or has white space around it."""
    text = os.environ.get(variable)
    if text is None:
        return None
    if text != text.strip():  # easily lost: by HTTP headers, and when it is copied by hand
        raise ConfigError(f"{variable}: begins or ends with white space, perhaps the end of a line; remove it")
    secret = text.encode(errors="surrogateescape")
    if len(secret) < LEAST_BYTES:
        raise ConfigError(
            f"{variable}: {len(secret)} bytes are too few; set at least {LEAST_BYTES}, for example the "
            "output of `openssl rand -hex 32`, or unset it"
        )
    return secret
