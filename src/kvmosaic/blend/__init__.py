"""Which tokens of the reused chunks a request recomputes."""

from kvmosaic.blend.base import Policy
from kvmosaic.blend.fixed import policy_for_ratio

__all__ = ["Policy", "policy_for_ratio"]
