"""What a policy is, what it sees, and what it answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from kvmosaic.core.prompt import ChunkedPrompt, Span

KVPart = Literal["k", "v"]
"""K or V."""

PROBE_TOKENS = 256
"""Maximum tokens of a question that are computed to find out what it attends to."""
QUERY_TOKENS = 64
"""Maximum tokens, the last of those, whose attention is averaged."""


class Check(NamedTuple):
    """In the blend pass, at ``layer``, only the ``keep`` tokens whose fresh K or V is farthest from the reused one
    go on to the layers behind it; the others keep their reused KV there."""

    layer: int
    keep: int
    part: KVPart


class Selection(NamedTuple):
    """Chunk tokens that a blend recomputes."""

    positions: tuple[int, ...] = ()
    """Ascending positions in the prompt."""
    checks: tuple[Check, ...] = ()
    """Where the set shrinks on its way through the layers; empty: all tokens go through all layers."""

    def layer_tokens(self, num_layers: int) -> int:
        """Tokens computed, summed over the layers."""
        total, rows, done = 0, len(self.positions), 0
        for check in self.checks:
            total += rows * (check.layer + 1 - done)
            rows, done = min(rows, check.keep), check.layer + 1
        return total + rows * (num_layers - done)


class AssembledPrompt(ABC):
    """A prompt whose chunks' KV stands in the request's cache, as policies see it. Probing costs compute, which is
    charged to the request: ``charged`` counts layer-tokens, one per token and layer computed."""

    def __init__(self, prompt: ChunkedPrompt, question: Span, num_layers: int, full_layers: Sequence[int]) -> None:
        """``question`` is what follows the last chunk, also one that is not reused."""
        self.prompt = prompt
        """Its chunks are those that are reused; all other tokens are computed anyway."""
        self.num_layers = num_layers
        self.full_layers = tuple(full_layers)
        """Layers whose attention reaches every earlier token, ascending."""
        self.chunk_tokens = sum(map(len, prompt.chunks))
        self.asked = Span(question.start, min(question.end, question.start + PROBE_TOKENS))
        """The part of the question that :meth:`question_attention` computes; engines may have no room for any."""
        self.charged = 0

    @abstractmethod
    def question_attention(self, layers: Sequence[int]) -> torch.Tensor:
        """How much the question attends to each chunk token at ``layers`` (ascending, full ones): ``[chunk tokens]``
        in fp32, averaged over heads, over its tokens and over layers; they sum to 1. Charges the question's way
        through the layers up to the last of these. ``asked`` must not be empty."""

    @abstractmethod
    def deviation(self, layer: int, part: KVPart) -> torch.Tensor:
        """Squared distance ``[chunk tokens]`` in fp32 between the reused K or V at ``layer`` and the one computed in
        sight of the whole prompt. Computes all chunk tokens in layers ``0 .. layer``, and leaves their fresh KV there
        in the request's cache; charges that."""

    def charged_ratio(self, selection: Selection) -> float:
        """What ``selection`` and the probes before it cost, as a share of computing all chunk tokens."""
        whole = self.num_layers * self.chunk_tokens
        return (self.charged + selection.layer_tokens(self.num_layers)) / whole if whole else 0.0

    @cached_property
    def places(self) -> np.ndarray:
        """Where each chunk token stands in its chunk, ``[chunk tokens]``."""
        begins = self.lengths.cumsum() - self.lengths
        places: np.ndarray = np.arange(self.chunk_tokens) - begins.repeat(self.lengths)
        return places

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each chunk, ``[chunks]``."""
        return np.array([len(span) for span in self.prompt.chunks], dtype=np.int64)

    def positions(self) -> torch.Tensor:
        """Position of each chunk token, ``[chunk tokens]``."""
        starts = np.array([span.start for span in self.prompt.chunks], dtype=np.int64)
        return torch.from_numpy(self.places + starts.repeat(self.lengths))

    def probe_share(self, layer: int, ratio: float) -> float:
        """What :meth:`question_attention` up to ``layer`` costs, as a share of what ``ratio`` allows."""
        return len(self.asked) * (layer + 1) / (ratio * self.num_layers * self.chunk_tokens)

    def affordable(self, ratio: float, part_of_layers: float = 1.0) -> int:
        """How many chunk tokens can still be recomputed in all layers (or this part of them) at this ratio."""
        left = ratio * self.num_layers * self.chunk_tokens - self.charged
        return max(0, min(self.chunk_tokens, int(left / (self.num_layers * part_of_layers) + 1e-9)))


class Policy(ABC):
    """Chooses which chunk tokens a blend recomputes. Policies are frozen pydantic dataclasses: their fields are the
    options a user can set."""

    name: ClassVar[str]
    reads_content: ClassVar[bool] = False
    """Whether what it chooses depends on more than the chunks' places."""
    picks_starts: ClassVar[bool] = False
    """Whether all it chooses are the first tokens of chunks. Of their own chunk these see nothing but one another, so
    that layers with a sliding window need no more of a chunk than its end."""

    @property
    def chunk_layers(self) -> int:
        """Layers through which all chunk tokens are computed before it chooses."""
        return 0

    def check(self, num_layers: int) -> None:
        """Raise :class:`ConfigError` if it cannot work with a model of ``num_layers``."""
        return None

    @property
    def narrows(self) -> bool:
        """Whether its set shrinks on its way through the layers."""
        return False

    def probes(self, assembled: AssembledPrompt, ratio: float) -> bool:
        """Whether :meth:`select` is going to probe the prompt, at ``0 < ratio < 1``. Everything in front of the
        question has to be computed before it does."""
        return False

    @abstractmethod
    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        """Tokens to recompute, with ``0 < ratio < 1`` the share of layer-tokens to spend, probes included."""


def choose(policy: Policy, assembled: AssembledPrompt, ratio: float) -> Selection:
    """What ``policy`` recomputes; at 0 it is not asked, nor at 1, where everything is recomputed."""
    if ratio <= 0 or not assembled.chunk_tokens:
        return Selection()
    if ratio >= 1:
        return Selection(tuple(assembled.positions().tolist()))
    policy.check(assembled.num_layers)
    selection = policy.select(assembled, ratio)
    chosen = np.array(selection.positions, dtype=np.int64)
    assert (np.diff(chosen) > 0).all()
    in_chunks = np.zeros(len(assembled.prompt.token_ids), dtype=bool)
    in_chunks[assembled.positions().numpy()] = True
    assert in_chunks[chosen].all()
    return selection
