"""How many examples Hypothesis tries: a share of them by default, all of them in `make test-all`."""

import os

ALL = os.environ.get("KVMOSAIC_TEST_EXAMPLES") == "all"


def examples(most: int) -> int:
    """Of a test that wants ``most`` where time does not matter."""
    return most if ALL else max(most // 3, min(most, 10))


EXAMPLES = examples(100)
