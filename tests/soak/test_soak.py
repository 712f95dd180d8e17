"""Three minutes of `make soak`."""

import os
import subprocess
import sys

import pytest

from tests import seeds
from tests.engines.vllm.helpers import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]


def test_three_minutes_of_random_traffic_and_faults() -> None:
    """It runs in a separate process, which starts engines in further ones."""
    environment = os.environ | {"SOAK_MINUTES": "3", seeds.VARIABLE: str(seeds.seed_of("soak"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak"], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
