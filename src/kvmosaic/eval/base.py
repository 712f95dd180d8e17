"""Examples, cells (a policy and a ratio), and rows of results."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Example:
    """One question about several documents."""

    system: str
    chunks: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    """Right answers; any one of them counts."""
    lead: str = ""
    """Beginning of the answer, which is given to the model. Models that write whole sentences, or continue with more
    questions, then give the answer at once."""


class Cell(NamedTuple):
    """One way to serve a prompt: a policy (as the user wrote it) and the share of chunk tokens it may recompute."""

    policy: str
    ratio: float


class Row(NamedTuple):
    """Results of a cell over all examples."""

    policy: str
    ratio: float
    charged_ratio: float
    """Layer-tokens computed for chunks, probes included, as a share of all; mean over examples."""
    kl_mean: float
    """KL divergence from full prefill in nats: mean over each full-prefill answer's tokens, then over examples."""
    kl_p95: float
    """95th percentile of this KL divergence over all tokens of all answers."""
    top1: float
    """Share of answer tokens at which the most likely token is the same as in full prefill."""
    em: float
    f1: float
    gap_closed: float | None
    """F1 as a share of the way from no context (0) to full prefill (1); ``None`` when context does not help."""
    prefill_ms: float
    """Milliseconds until the first token is known, with all chunks cached; median over examples."""
    n: int
    """Number of examples."""
