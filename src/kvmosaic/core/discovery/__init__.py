"""Finds recurring text in prompts whose documents are not named."""

from kvmosaic.core.discovery.choice import Discovered
from kvmosaic.core.discovery.discovery import MIN_RUN, Discovery

__all__ = ["MIN_RUN", "Discovered", "Discovery"]
