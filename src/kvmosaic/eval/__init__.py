"""How close answers from reused chunks come to those of a full prefill, on the user's model and data."""
