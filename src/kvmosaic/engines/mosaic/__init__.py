"""Requests drawn as mosaics: one page, for a server and for files."""

from kvmosaic.engines.mosaic.page import content_policy, file_page, live_page

__all__ = ["content_policy", "file_page", "live_page"]
