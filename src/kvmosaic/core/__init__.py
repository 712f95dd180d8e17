"""What a prompt, a key, an entry, a rotation and a mask are. No engine, and no I/O but reading settings."""
