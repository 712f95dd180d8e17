"""Policies that choose which tokens of the reused chunks a request recomputes."""

from kvmosaic.blend.base import AssembledPrompt, Check, Policy, Selection, choose
from kvmosaic.blend.names import POLICIES, policy_named

__all__ = ["POLICIES", "AssembledPrompt", "Check", "Policy", "Selection", "choose", "policy_named"]
