"""Examples are as short as possible."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def short_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVMOSAIC_MIN_CHUNK_TOKENS", "1")
        yield
