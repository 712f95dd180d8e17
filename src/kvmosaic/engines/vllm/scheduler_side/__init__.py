"""The scheduler's side: which requests have chunks, what they wait for, which blocks they get, what they report."""
