"""Two processes over one store are killed again and again: nothing wrong is served, and no lasting entry is lost."""

import pytest

from tests.store.soak import MILLION, Kind, soak


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["roomy", "tight"])
def test_a_few_rounds(kind: Kind) -> None:
    outcome = soak(10_000, kinds=(kind,), most=5_000)
    print(outcome)
    assert outcome.is_right, outcome
    assert outcome.kills > 0
    assert outcome.kept > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_million_operations() -> None:
    outcome = soak(MILLION)
    print(outcome)
    assert outcome.is_right, outcome
