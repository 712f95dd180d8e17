"""Options that cannot work are refused before anything is started."""

import pytest

from kvmosaic.cli.main import app
from kvmosaic.core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("throughput", "--rates", "2,fast"), "--rates 2,fast: must be positive numbers"),
        (("throughput", "--rates", "0"), "--rates 0: must be positive numbers"),
        (("throughput", "--rates", "2,nan"), "--rates 2,nan: must be positive numbers"),
        (("throughput", "--per-query", "201"), "201 documents per query: there are only 200"),
        (("throughput", "--new-per-query", "15"), "15 new documents per query: a query has only 14"),
        (("throughput", "--plot", "plot.png"), "plots are SVG"),
        (("throughput", "--lmcache-ratio", "0.15"), "LMCache is not installed"),
        (("throughput", "--ratios", "0,1.5"), "--ratios 0,1.5: must be between 0 and 1"),
        (("sustained", "--plot", "nowhere/plot.svg"), "there is no directory nowhere"),
        (("sustained", "--queries", "60"), "at least two batches"),
        (("interference", "--policy", "nothing"), "nothing"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(arguments, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        app(["bench", *arguments], standalone_mode=False)
    assert "\n" not in str(caught.value)
