"""Measurements that print ratios taken in one run."""
