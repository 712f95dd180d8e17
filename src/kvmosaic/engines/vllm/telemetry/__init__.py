"""What is measured: counts, times, and the costs predicted from them."""
