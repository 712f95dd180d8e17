"""Remote stores for commands. Engines start without their remote store; these commands do not."""

import logging
from contextlib import closing
from typing import TYPE_CHECKING

from kvmosaic.core.errors import ConfigError
from kvmosaic.core.remote_url import without_passwords

if TYPE_CHECKING:  # importing it for real takes seconds
    from kvmosaic.store.tiers.remote import RemoteTier

DEADLINE_S = 10.0


def open_remote(url: str) -> "RemoteTier":
    """The store at ``url``. It is not contacted yet."""
    from kvmosaic.store.seal import EntryCheck, Seal
    from kvmosaic.store.tiers.remote import open_remote_tier

    # No warning that the store is down: the command ends with that error.
    logging.getLogger("kvmosaic.store.breaker").setLevel(logging.ERROR)
    try:
        return open_remote_tier(url, DEADLINE_S, check=EntryCheck(Seal.from_environment()))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--remote {without_passwords(url)}: {error}") from None


def reach(url: str) -> None:
    """Raise an ``OSError`` if the store at ``url`` does not answer, before any work is wasted."""
    with closing(open_remote(url)) as tier:
        tier.check()
    logging.getLogger("kvmosaic.store.breaker").setLevel(logging.NOTSET)
