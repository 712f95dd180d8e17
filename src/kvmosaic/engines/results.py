"""What a request gives back, in any engine."""

from dataclasses import dataclass
from typing import Any, Literal

from kvmosaic.core.prompt import Span


@dataclass(frozen=True)
class ChunkReport:
    """What happened to one chunk of a prompt."""

    span: Span
    status: Literal["cached", "filled", "prefilled"]
    """Found in the store, computed alone and stored, or computed as ordinary text of this request."""
    tier: str | None
    """Where it was found, when cached; ``request`` for a repeat of a chunk filled for the same prompt."""
    reason: str | None
    """Why it was not found, otherwise."""

    def as_dict(self) -> dict[str, Any]:
        """Also of the span. ``dataclasses.asdict`` takes ten times as long, and a prompt may have many chunks."""
        return vars(self) | {"span": dict(vars(self.span))}


@dataclass(frozen=True)
class RequestOutput:
    """One answer. Token counts: ``prompt = cached + filled + prefilled``; recomputed ones are among the first two."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    mode: Literal["plain", "fill", "reuse"]
    """Ordinary generation; some chunks were filled first; chunks were reused and none was filled."""
    ttft_ms: float
    """Milliseconds to the first token, from when this prompt's turn comes."""
    prompt_tokens: int
    cached_tokens: int
    filled_tokens: int
    recomputed_tokens: int
    charged_ratio: float
    """What recomputing and choosing cost, as a share of computing all chunk tokens in all layers."""
    prefilled_tokens: int
    chunks: tuple[ChunkReport, ...]
    fallback_reason: str | None = None
    """Why a prompt with chunks was served by ordinary generation."""
