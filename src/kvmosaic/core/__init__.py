"""Prompts, keys, entries, rotations and masks. No engine code, and no I/O except for settings and profiles."""
