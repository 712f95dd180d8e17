"""What a prompt, a key, an entry, a rotation and a mask are. No I/O, no engine."""
