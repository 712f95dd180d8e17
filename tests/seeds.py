"""One seed for everything that tests draw at random. It is printed, can be set, and is the same in any order and any
process."""

import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

VARIABLE = "KVMOSAIC_TEST_SEED"
SESSION = int(os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(2**31))))
"""The session's seed. It is in the environment, so that pytest's workers, which are separate processes, have the
same."""


def seed_of(name: str) -> int:
    """Seed of a test or a fixture of this name, derived from the session's seed."""
    return zlib.crc32(f"{SESSION} {name}".encode())


def seed_all(name: str) -> None:
    """Seed every generator that tests use."""
    seed = seed_of(name)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Seed the generators inside the block, and restore them after it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(name)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
