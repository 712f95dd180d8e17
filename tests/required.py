"""Requirements of tests besides the package: without them tests are skipped, or fail in CI."""

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

import pytest


def missing(reason: str, advice: str = "`make servers` installs it") -> NoReturn:
    """Skip the test, or fail if everything is required."""
    if os.environ.get("KVMOSAIC_REQUIRE_SERVERS") == "1":
        pytest.fail(f"{reason}; KVMOSAIC_REQUIRE_SERVERS=1 wants it")
    pytest.skip(f"{reason}; {advice}", allow_module_level=True)


def need_triton() -> None:
    """Skip modules that import kernels if Triton is missing. It exists for Linux only."""
    if find_spec("triton") is None:
        if sys.platform == "linux":
            missing("there is no package triton", "the extra `dev` installs it")
        pytest.skip("there is no Triton for this system", allow_module_level=True)
