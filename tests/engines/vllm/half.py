"""vLLM in half precision, also on CPUs without instructions for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import vllm._custom_ops as custom_ops

from tests.half_precision import IS_NATIVE, fast_products


@contextmanager
def half_precision() -> Iterator[None]:
    """Half precision for engines of this process. Without such instructions, vLLM uses slow matrix products of
    oneDNN. They are replaced by torch's, which are made faster."""
    with pytest.MonkeyPatch.context() as patch, fast_products():
        if not IS_NATIVE:
            patch.setattr(custom_ops, "_supports_onednn", False)
        yield
