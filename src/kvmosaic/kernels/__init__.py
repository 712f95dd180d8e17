"""Tensor operations that move KV. Each has a torch reference that runs everywhere."""
