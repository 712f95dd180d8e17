"""The results of a request, in any engine."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvmosaic.core.prompt import Span

MAX_SPANS = 1024
"""Maximum number of spans in a report's list of recomputed tokens."""

ChunkStatus = Literal["cached", "filled", "prefilled"]
"""Status of a chunk: found in the store, computed alone and stored, or computed as ordinary text of this request."""


class Fallback(str, Enum):
    """Why a request with chunks is served by an ordinary prefill."""

    DISABLED = "disabled"
    """The chunk cache is off for this request or this engine."""
    BAD_PARAMETERS = "bad-parameters"
    """A parameter of the request is wrong."""
    NOT_ALLOWED = "not-allowed"
    """The request has a parameter that clients of this engine may not send."""
    LORA = "lora"
    """KV depends on the adapter, and its weights are not known yet or have just changed."""
    PROMPT_EMBEDS = "prompt-embeds"
    """The prompt is not given by token ids."""
    MULTIMODAL = "multimodal"
    """All chunks come after an image, or an input of another kind, that is left to vLLM."""
    EVERY_TOKEN_WANTED = "every-token-wanted"
    """Prompt logprobs and pooling need hidden states that reuse does not compute."""
    WINDOW = "window"
    """The policy recomputes inside chunks, but entries lack the first tokens of layers with a sliding window."""
    SELF_TEST = "self-test"
    """The engine failed its self-test."""
    WEIGHTS = "unknown-weights"
    """The model's weights cannot be identified."""
    NOT_STORED = "not-stored"
    """So little of the chunks is stored that reuse would save no tokens."""
    PREFIX_CACHED = "prefix-cached"
    """vLLM's prefix cache has as much of the prompt as reuse would save, and exactly."""
    SLOWER = "slower"
    """Reuse is predicted to be slower than a prefill, or choosing the tokens to recompute would delay others."""
    SHRINKING_SET = "shrinking-set"
    """The policy's set shrinks from layer to layer, and the model's layers do not allow that, or its tokens are more
    than a pass has room for."""
    SLOW_TIER = "slow-tier"
    """Chunks did not arrive in time."""
    LOAD_ERROR = "load-error"
    """Chunks could not be brought into the request's blocks."""
    ERROR = "error"
    """Another part of kvmosaic failed."""
    ROPE_LENGTH = "rope-length"
    """The model's rotary table is different for every prompt of this length."""


@dataclass(frozen=True)
class ChunkReport:
    """Outcome of one chunk of a prompt."""

    span: Span
    status: ChunkStatus
    tier: str | None
    """The tier that had it, if cached; ``request`` for a repeat of a chunk filled for the same prompt."""
    reason: str | None
    """Why it was not found, if not cached."""

    def as_dict(self) -> dict[str, Any]:
        """Includes the span. ``dataclasses.asdict`` takes ten times as long, and a prompt may have many chunks."""
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
    """Milliseconds to the first token, from the start of work on this prompt."""
    prompt_tokens: int
    cached_tokens: int
    filled_tokens: int
    recomputed_tokens: int
    charged_ratio: float
    """Cost of recomputing and choosing, as a share of computing all chunk tokens in all layers."""
    prefilled_tokens: int
    chunks: tuple[ChunkReport, ...]
    recomputed: tuple[tuple[int, int], ...] = ()
    """Start and end of the recomputed tokens; see :func:`joined`."""
    probed: bool | None = None
    """Whether the policy probed the prompt to choose them; ``None`` if no policy was asked."""
    absent_documents: tuple[int, ...] = ()
    """Indices of the named documents that occur nowhere in the prompt."""
    fallback_reason: str | None = None
    """Why a prompt with chunks was served by ordinary generation."""


def joined(positions: npt.ArrayLike) -> list[list[int]]:
    """Start and end of the runs in ``positions`` ``[tokens]``, which ascend. If there are more than
    :data:`MAX_SPANS`, spans also join across the narrowest gaps, so that a report stays short."""
    places = np.asarray(positions, dtype=np.int64)
    if not len(places):
        return []
    gaps = np.diff(places)
    breaks = np.flatnonzero(gaps > 1)
    if len(breaks) >= MAX_SPANS:
        widest = np.argsort(gaps[breaks], kind="stable")[-(MAX_SPANS - 1) :]
        breaks = np.sort(breaks[widest])
    starts = places[np.concatenate(([0], breaks + 1))]
    ends = places[np.concatenate((breaks, [len(places) - 1]))] + 1
    return [[int(start), int(end)] for start, end in zip(starts, ends, strict=True)]
