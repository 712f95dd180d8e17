"""Images in models that vLLM imports only where there is torchvision. PyPI's is a build for CUDA, and would break
transformers beside a CPU build of torch. So ``make`` puts it into a folder of its own, which only these tests use."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.vllm.helpers import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.long]

SHIM = Path(__file__).parent / "torchvision_shim"
TORCHVISION = Path(sys.prefix) / "torchvision"


@pytest.mark.parametrize("family", ["qwen2 and not qwen25", "qwen25"])
def test_images_where_there_is_torchvision(family):
    if find_spec("torchvision"):
        pytest.skip("test_images.py has these models")
    if not (TORCHVISION / "torchvision").is_dir():
        pytest.skip(f"there is no torchvision in {TORCHVISION}")
    paths = [str(SHIM), str(TORCHVISION), *filter(None, [os.environ.get("PYTHONPATH")])]
    tests = ["tests/engines/vllm/test_images.py", "-k", family, "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
