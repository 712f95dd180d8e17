"""Measurements: counts, times, and the costs predicted from them."""
