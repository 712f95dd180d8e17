"""The worker's side: brings entries into blocks, chooses what is recomputed, computes it."""
