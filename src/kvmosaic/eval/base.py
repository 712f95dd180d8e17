"""What is asked, and what comes out."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Example:
    """One question about several documents."""

    system: str
    chunks: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    """Each of them is right."""
    lead: str = ""
    """How the answer begins. It is given to the model: one that makes whole sentences, or goes on asking, then comes
    to the answer at once."""


class Cell(NamedTuple):
    """One way to serve a prompt: a policy (as the user wrote it) and the share of chunk tokens it may recompute."""

    policy: str
    ratio: float


class Row(NamedTuple):
    """What a cell gave, over all examples."""

    policy: str
    ratio: float
    charged_ratio: float
    """Layer-tokens computed for chunks, probes included, as a share of all; mean over examples."""
    kl_mean: float
    """KL divergence from full prefill in nats: mean over each full-prefill answer's tokens, then over examples."""
    kl_p95: float
    """95th percentile of the same over all tokens of all answers."""
    top1: float
    """Share of those tokens that would have been chosen here, too."""
    em: float
    f1: float
    gap_closed: float | None
    """F1 as a share of the way from no context (0) to full prefill (1); ``None`` when context does not help."""
    prefill_ms: float
    """Until the first token is known, all chunks being cached; median over examples."""
    n: int
    """Examples."""
