"""Number of examples that Hypothesis tries: a share by default, all of them in `make test-all`."""

import os

ALL = os.environ.get("KVMOSAIC_TEST_EXAMPLES") == "all"


def examples(most: int, few: int | None = None) -> int:
    """``most`` examples if time does not matter, otherwise ``few`` or a third of them. Every run draws new ones."""
    return most if ALL else few or max(most // 3, min(most, 10))


EXAMPLES = examples(100)
