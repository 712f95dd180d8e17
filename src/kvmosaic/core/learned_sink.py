"""A learned sink: KV that chunks are computed after. It is trained, not computed from a text."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.heads import HeadShare

WITNESS_TOKENS = 16
"""Number of tokens whose values in the last layer identify a model."""
WITNESS_TOLERANCE = 0.1
"""Maximum relative difference of these values for a model to count as the one that a sink was learned for. Rounding
to half precision causes a difference of 0.02, another model one of 1."""
QUANTISED_TOLERANCE = 0.4
"""Maximum relative difference of these values for models that attend to a quantised KV cache."""
PLACEHOLDER = -1
"""Stand-in for each token of a learned sink, where keys and entries list the tokens before a chunk. It is not a valid
token id, so nothing that a client sends can be mistaken for a learned sink."""


class SinkAbout(BaseModel):
    """Origin of a learned sink. No field depends on the time of creation."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str
    """Name of the model, for messages."""
    data: list[str] = Field(default_factory=list)
    """Training data."""
    recipe: dict[str, float | int | str] = Field(default_factory=dict)
    kl_before: float
    """Mean KL to a full prefill on held-out prompts, with the default text as sink and nothing recomputed."""
    kl_after: float
    kvmosaic: str


@dataclass(frozen=True, eq=False)
class LearnedSink:
    """KV that precedes every chunk while it is filled, as if it were the KV of some tokens."""

    k: torch.Tensor
    """``[layers, heads, tokens, k_dim]``, keys rotated for positions from 0 on."""
    v: torch.Tensor
    """``[layers, heads, tokens, v_dim]``."""
    witness: torch.Tensor
    """``[heads, WITNESS_TOKENS, v_dim]``: values of the :func:`witness_tokens` in the model's last layer."""
    about: SinkAbout = field(repr=False)

    def __post_init__(self) -> None:
        if self.k.dim() != 4 or self.v.shape[:3] != self.k.shape[:3] or min(self.k.shape) < 1:
            raise ValueError(f"K has the shape {tuple(self.k.shape)} and V {tuple(self.v.shape)}")
        if self.witness.shape != (self.k.shape[1], WITNESS_TOKENS, self.v.shape[-1]):
            raise ValueError(f"its witness has the wrong shape {tuple(self.witness.shape)}")
        if not all(bool(part.isfinite().all()) for part in (self.k, self.v, self.witness)):
            raise ValueError("some of its numbers are not finite")

    @property
    def tokens(self) -> tuple[int, ...]:
        """Stand-ins for the sink in keys and entries, one per token."""
        return (PLACEHOLDER,) * self.k.shape[2]

    @cached_property
    def digest(self) -> str:
        """Hash of K and V. KV that was filled after different sinks is different."""
        digest = xxhash.xxh3_128()
        for part in (self.k, self.v):
            digest.update(part.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def kv(
        self, dtype: torch.dtype, device: torch.device, heads: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, layers, tokens, k_dim]`` and V of some heads, in the layout that fills use."""
        k, v = (part[:, heads].transpose(0, 1).to(device, dtype).contiguous() for part in (self.k, self.v))
        return k, v

    def check(
        self, kv_format: KVFormat, witness: torch.Tensor, share: HeadShare, *, is_quantised: bool = False
    ) -> None:
        """Raise a :class:`ConfigError` for a model that the sink was not learned for. ``kv_format`` and ``witness``
        (as in :attr:`witness`) are those of the model, for the heads in ``share``; ``is_quantised``: with a quantised
        KV cache."""
        layers, heads = self.k.shape[:2]
        own = (layers, heads, self.k.shape[3], self.v.shape[3])
        needed = (kv_format.layers, share.heads.total, kv_format.k_dim, kv_format.v_dim)
        if own != needed:
            raise self._refusal(f"it has (layers, heads, dims of K and V) {own}, and this model has {needed}")
        theirs, ours = self.witness[share.heads.first : share.heads.last + 1].float(), witness.float().cpu()
        distance = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
        if not distance <= (QUANTISED_TOLERANCE if is_quantised else WITNESS_TOLERANCE):
            raise self._refusal(f"this model's values are {distance:.0%} off")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"the sink was learned for {self.about.model}: {why}; run kvmosaic tune for this model, or use "
            "sink_prefix=document"
        )


def witness_tokens(vocabulary: int) -> list[int]:
    """Token ids that are used to identify models. ``vocabulary``: number of token ids."""
    return [(7919 * (index + 1)) % vocabulary for index in range(WITNESS_TOKENS)]
