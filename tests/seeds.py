"""One seed for all that tests draw at random: printed, settable, and the same in any order and any process."""

import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

VARIABLE = "KVMOSAIC_TEST_SEED"
SESSION = int(os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(2**31))))
"""In the environment, so that pytest's workers, which are processes of their own, have the same."""


def seed_of(name: str) -> int:
    """What the session's seed says for a test or a fixture of this name."""
    return zlib.crc32(f"{SESSION} {name}".encode())


def seed_all(name: str) -> None:
    """Seed every generator that tests use."""
    seed = seed_of(name)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Seed the generators for what is inside, and put them back behind it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(name)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
