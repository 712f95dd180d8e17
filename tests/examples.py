"""How many examples Hypothesis tries: a share of them by default, all of them in `make test-all`."""

import os

ALL = os.environ.get("KVMOSAIC_TEST_EXAMPLES") == "all"


def examples(most: int, few: int | None = None) -> int:
    """``most`` where time does not matter, else ``few`` or a third; they are others in every run."""
    return most if ALL else few or max(most // 3, min(most, 10))


EXAMPLES = examples(100)
