"""The two ends of the scale: recompute nothing, recompute everything."""

from collections.abc import Iterable
from itertools import chain

from kvmosaic.blend.base import Policy
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.prompt import ChunkedPrompt


def recompute_none(prompt: ChunkedPrompt) -> Iterable[int]:
    """Chunks are used as they were computed alone."""
    return ()


def recompute_all(prompt: ChunkedPrompt) -> Iterable[int]:
    """Every chunk token is recomputed: the result is that of a full prefill."""
    return chain.from_iterable(span.positions for span in prompt.chunks)


def policy_for_ratio(ratio: float) -> Policy:
    """The policy that recomputes this share of a request's chunk tokens."""
    if ratio == 0.0:
        return recompute_none
    if ratio == 1.0:
        return recompute_all
    raise ConfigError(f"recompute_ratio={ratio}: only 0.0 and 1.0 are available in this version; use one of them")
