"""A learned sink: KV that chunks are computed after, found by training instead of computed from a text."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from kvmosaic.core.entry import KVFormat
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.heads import HeadShare

WITNESS_TOKENS = 16
"""Tokens whose values in the last layer tell models apart."""
WITNESS_TOLERANCE = 0.1
"""Relative difference of those values up to which a model counts as the one a sink was learned for. Rounding to half
precision makes 0.02; another model has 1."""
PLACEHOLDER = -1
"""Number that stands for each token of a learned sink where keys and entries name what precedes a chunk. No token
has it, so nothing that a client sends can be taken for a learned sink."""


class SinkAbout(BaseModel):
    """Where a learned sink comes from. Nothing in it depends on when it was made."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str
    """Name of the model, for messages."""
    data: list[str] = Field(default_factory=list)
    """What it was learned from."""
    recipe: dict[str, float | int | str] = Field(default_factory=dict)
    kl_before: float
    """Mean KL to a full prefill on held-out prompts with the default text, nothing recomputed."""
    kl_after: float
    kvmosaic: str


@dataclass(frozen=True, eq=False)
class LearnedSink:
    """Numbers that stand before every chunk while it is filled, as if they were the KV of some tokens."""

    k: torch.Tensor
    """``[layers, heads, tokens, k_dim]``, keys turned as at positions from 0 on."""
    v: torch.Tensor
    """``[layers, heads, tokens, v_dim]``."""
    witness: torch.Tensor
    """``[heads, WITNESS_TOKENS, v_dim]``: values in the model's last layer of tokens that everybody knows."""
    about: SinkAbout = field(repr=False)

    def __post_init__(self) -> None:
        if self.k.dim() != 4 or self.v.shape[:3] != self.k.shape[:3] or min(self.k.shape) < 1:
            raise ValueError(f"K is {tuple(self.k.shape)} and V {tuple(self.v.shape)}")
        if self.witness.shape != (self.k.shape[1], WITNESS_TOKENS, self.v.shape[-1]):
            raise ValueError(f"its witness is {tuple(self.witness.shape)}")
        if not all(bool(part.isfinite().all()) for part in (self.k, self.v, self.witness)):
            raise ValueError("some of its numbers are not finite")

    @property
    def tokens(self) -> tuple[int, ...]:
        """What stands for it in keys and entries."""
        return (PLACEHOLDER,) * self.k.shape[2]

    @cached_property
    def digest(self) -> str:
        """Of its numbers: KV that was filled after another sink is other KV."""
        digest = xxhash.xxh3_128()
        for part in (self.k, self.v):
            digest.update(part.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def kv(
        self, dtype: torch.dtype, device: torch.device, heads: slice = slice(None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K ``[heads, layers, tokens, k_dim]`` and V of some heads, as fills take them."""
        k, v = (part[:, heads].transpose(0, 1).to(device, dtype).contiguous() for part in (self.k, self.v))
        return k, v

    def check(self, kv_format: KVFormat, witness: torch.Tensor, share: HeadShare) -> None:
        """Refuse a model that it was not learned for. ``kv_format``, and ``witness`` as in :attr:`witness`, are those
        of the heads in ``share``."""
        layers, heads = self.k.shape[:2]
        own = (layers, heads, self.k.shape[3], self.v.shape[3])
        needed = (kv_format.layers, share.heads.total, kv_format.k_dim, kv_format.v_dim)
        if own != needed:
            raise self._refusal(f"it has (layers, heads, dims of K and V) {own}, and this model has {needed}")
        theirs, ours = self.witness[share.heads.first : share.heads.last + 1].float(), witness.float().cpu()
        distance = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
        if not distance <= WITNESS_TOLERANCE:
            raise self._refusal(f"this model's values are {distance:.0%} off")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"the sink was learned for {self.about.model}: {why}; run kvmosaic tune for this model, or use "
            "sink_prefix=document"
        )


def witness_tokens(vocabulary: int) -> list[int]:
    """Token ids by which models are told apart; ``vocabulary``: how many there are."""
    return [(7919 * (index + 1)) % vocabulary for index in range(WITNESS_TOKENS)]
