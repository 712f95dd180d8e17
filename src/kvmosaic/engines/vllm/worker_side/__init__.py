"""The worker's side: loads entries into blocks, chooses the tokens to recompute, and computes them."""
