"""URLs of remote tiers: ``valkey://user@host:port/database``, ``valkeys://…`` over TLS, or
``mooncake://master:port``."""

import re
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

DEFAULT_PORTS = {"valkey": 6379, "redis": 6379, "valkeys": 6379, "rediss": 6379, "mooncake": 50051}
WITH_TLS = ("valkeys", "rediss")
PASSWORD_VARIABLE = "KVMOSAIC_REMOTE_PASSWORD"
"""Environment variable of the password. Settings and arguments are unsafe: vLLM logs its whole configuration, and
process lists show arguments."""
DEFAULT_METRICS_PORT = 9003
EXAMPLES = "valkey://host:6379/0, redis://host:6379/0 or mooncake://host:50051"


def without_passwords(text: str) -> str:
    """A text with everything between the first ``://`` and the last ``@`` masked. A URL may contain a password there,
    which must not be logged. A password may contain any character, so more than the password may be masked."""
    return re.sub(r"://.*@", "://***@", text, flags=re.DOTALL)


class RemoteUrl(NamedTuple):
    """A parsed URL."""

    kind: str
    """``valkey`` (also for Redis, which has the same protocol) or ``mooncake``."""
    host: str
    port: int
    database: int = 0
    """Number of the Valkey database."""
    metrics_port: int = DEFAULT_METRICS_PORT
    """HTTP port where Mooncake's master lists its keys."""
    user: str | None = None
    """User name for a Valkey server; ``None`` for its default user."""
    tls: bool = False
    """Whether to use TLS, with the certificate authorities that this machine trusts."""

    @classmethod
    def parse(cls, text: str) -> "RemoteUrl":
        """Parse a URL. Raises a one-line ``ValueError`` that states the problem."""
        parts = urlsplit(text)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"not the URL of a remote store; write {EXAMPLES}")
        kind = "mooncake" if parts.scheme == "mooncake" else "valkey"
        if parts.password is not None:
            raise ValueError(f"a password does not belong in a URL; set {PASSWORD_VARIABLE}")
        if parts.fragment or (parts.username is not None and kind == "mooncake"):
            raise ValueError("only host and port may be given, and for Valkey a user and a database")
        path, options = parts.path.strip("/"), parse_qs(parts.query, keep_blank_values=True)
        metrics = options.pop("metrics_port", [str(DEFAULT_METRICS_PORT)]) if kind == "mooncake" else ["0"]
        if options or (path and kind == "mooncake"):
            allowed = "metrics_port=9003 after a question mark" if kind == "mooncake" else "a database number"
            raise ValueError(f"after host and port there may only be {allowed}")
        if not (path or "0").isdecimal() or not metrics[-1].isdecimal():
            raise ValueError("the database and the ports must be numbers")
        port = parts.port or DEFAULT_PORTS[parts.scheme]  # urllib raises a one-line error for an invalid port
        tls = parts.scheme in WITH_TLS
        return cls(kind, parts.hostname, port, int(path or 0), int(metrics[-1]), parts.username or None, tls)
