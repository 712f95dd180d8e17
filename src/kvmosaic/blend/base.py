"""What a policy is."""

from collections.abc import Callable, Iterable

from kvmosaic.core.prompt import ChunkedPrompt

Policy = Callable[[ChunkedPrompt], Iterable[int]]
"""A policy is one function: prompt in, positions of the chunk tokens to recompute out (ascending).

The engine recomputes them together with the fresh tokens in one pass over the assembled prompt, where
each sees exactly the tokens at or before its own position."""
