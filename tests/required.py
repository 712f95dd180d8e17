"""What tests need beside the package: where it is missing they are skipped, and in CI they fail."""

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

import pytest


def missing(reason: str, advice: str = "`make servers` installs it") -> NoReturn:
    """Skip, or fail where everything is required."""
    if os.environ.get("KVMOSAIC_REQUIRE_SERVERS") == "1":
        pytest.fail(f"{reason}; KVMOSAIC_REQUIRE_SERVERS=1 wants it")
    pytest.skip(f"{reason}; {advice}", allow_module_level=True)


def need_triton() -> None:
    """For modules that import kernels; Triton exists for Linux alone."""
    if find_spec("triton") is None:
        if sys.platform == "linux":
            missing("there is no package triton", "the extra `dev` installs it")
        pytest.skip("there is no Triton for this system", allow_module_level=True)
