"""Finds text that comes back in prompts in which nothing is named."""

from kvmosaic.core.discovery.choice import Discovered
from kvmosaic.core.discovery.discovery import MIN_RUN, Discovery

__all__ = ["MIN_RUN", "Discovered", "Discovery"]
