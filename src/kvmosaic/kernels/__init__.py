"""Tensor operations that move KV. Each has a torch reference that runs on any device."""
