"""The interface of policies, their input and their output."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch

from kvmosaic.core.errors import KvmosaicError
from kvmosaic.core.prompt import ChunkedPrompt, Span

KVPart = Literal["k", "v"]
"""K or V."""

PROBE_TOKENS = 256
"""Maximum number of a question's tokens that are computed to find out what it attends to."""
QUERY_TOKENS = 64
"""Maximum number of tokens whose attention is averaged: the last ones of the probed tokens."""


class Check(NamedTuple):
    """A layer of the blend pass at which the set of tokens shrinks. Only the ``keep`` tokens whose fresh K or V is
    farthest from the reused one are computed in the layers after ``layer``. The others keep their reused KV there."""

    layer: int
    keep: int
    part: KVPart


class Selection(NamedTuple):
    """Chunk tokens that a blend recomputes."""

    positions: tuple[int, ...] = ()
    """Ascending positions in the prompt."""
    checks: tuple[Check, ...] = ()
    """Layers at which the set shrinks. Empty: all tokens are computed in all layers."""

    def layer_tokens(self, num_layers: int) -> int:
        """Number of computed tokens, summed over the layers."""
        total, rows, done = 0, len(self.positions), 0
        for check in self.checks:
            total += rows * (check.layer + 1 - done)
            rows, done = min(rows, check.keep), check.layer + 1
        return total + rows * (num_layers - done)


class AssembledPrompt(ABC):
    """A prompt with the KV of its chunks in the request's cache, as policies see it. The compute of probes is charged
    to the request: ``charged`` counts layer-tokens, one per computed token and layer."""

    def __init__(self, prompt: ChunkedPrompt, question: Span, num_layers: int, full_layers: Sequence[int]) -> None:
        """``question``: the tokens after the last chunk, even if that chunk is not reused."""
        self.prompt = prompt
        """The prompt. Its chunks are those that are reused; all other tokens are computed anyway."""
        self.num_layers = num_layers
        self.full_layers = tuple(full_layers)
        """Layers whose attention sees every earlier token, ascending."""
        self.chunk_tokens = sum(map(len, prompt.chunks))
        self.asked = Span(question.start, min(question.end, question.start + PROBE_TOKENS))
        """The part of the question that :meth:`question_attention` computes; empty if an engine has no room or no
        time for a probe."""
        self.charged = 0

    @abstractmethod
    def question_attention(self, layers: Sequence[int]) -> torch.Tensor:
        """How much the question attends to each chunk token: ``[chunk tokens]`` in fp32, averaged over heads, over
        the question's tokens and over ``layers`` (full ones, ascending). The values sum to 1. Charges the question's
        tokens in all layers up to the last of ``layers``. ``asked`` must not be empty."""

    @abstractmethod
    def deviation(self, layer: int, part: KVPart) -> torch.Tensor:
        """Squared distance ``[chunk tokens]`` in fp32 between the reused K or V at ``layer`` and the one computed
        with all earlier tokens of the prompt visible. Computes all chunk tokens in layers ``0 .. layer``, leaves
        their fresh KV of these layers in the request's cache, and charges that."""

    @property
    def was_probed(self) -> bool:
        """Whether a policy has probed it."""
        return self.charged > 0

    def charged_ratio(self, selection: Selection) -> float:
        """Cost of ``selection`` and of the probes before it, as a share of the cost of computing all chunk tokens."""
        whole = self.num_layers * self.chunk_tokens
        return (self.charged + selection.layer_tokens(self.num_layers)) / whole if whole else 0.0

    @cached_property
    def places(self) -> np.ndarray:
        """Offset of each chunk token in its chunk, ``[chunk tokens]``."""
        begins = self.lengths.cumsum() - self.lengths
        places: np.ndarray = np.arange(self.chunk_tokens) - begins.repeat(self.lengths)
        return places

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each chunk, ``[chunks]``."""
        return np.array([len(span) for span in self.prompt.chunks], dtype=np.int64)

    def positions(self) -> torch.Tensor:
        """Position of each chunk token, ``[chunk tokens]``."""
        starts = np.array([span.start for span in self.prompt.chunks], dtype=np.int64)
        return torch.from_numpy(self.places + starts.repeat(self.lengths))

    def probe_share(self, layer: int, ratio: float) -> float:
        """Cost of :meth:`question_attention` up to ``layer``, as a share of the budget that ``ratio`` allows."""
        return len(self.asked) * (layer + 1) / (ratio * self.num_layers * self.chunk_tokens)

    def affordable(self, ratio: float, part_of_layers: float = 1.0) -> int:
        """Number of chunk tokens that the rest of the budget allows in all layers (or in this part of them)."""
        left = ratio * self.num_layers * self.chunk_tokens - self.charged
        return max(0, min(self.chunk_tokens, int(left / (self.num_layers * part_of_layers) + 1e-9)))


class Policy(ABC):
    """Chooses which chunk tokens a blend recomputes. Policies are frozen pydantic dataclasses. Their fields are the
    options that users can set."""

    name: ClassVar[str]
    reads_content: ClassVar[bool] = False
    """Whether the choice depends on more than the positions of the chunks."""
    picks_starts: ClassVar[bool] = False
    """Whether only the first tokens of chunks are chosen. In their own chunk these see only each other, so layers
    with a sliding window need only the end of a chunk."""
    can_skip_probe: ClassVar[bool] = False
    """Whether it also chooses tokens for a prompt that it may not probe, whose ``asked`` is empty."""
    keeps_ratio: ClassVar[bool] = True
    """Whether the choice, with its probes, costs no more than the ratio allows."""

    @property
    def chunk_layers(self) -> int:
        """Number of layers in which all chunk tokens are computed before the choice."""
        return 0

    def check(self, num_layers: int) -> None:
        """Raise a :class:`ConfigError` if the policy cannot work with a model of ``num_layers`` layers."""
        return None

    @property
    def narrows(self) -> bool:
        """Whether the set of chosen tokens shrinks from layer to layer."""
        return False

    def asks_at(self, assembled: AssembledPrompt, ratio: float) -> Sequence[int]:
        """Layers at which :meth:`select` will ask for ``question_attention``, at ``0 < ratio < 1``; empty if it will
        not. An engine may compute the questions of several requests in one pass before it calls ``select``."""
        return ()

    def probes(self, assembled: AssembledPrompt, ratio: float) -> bool:
        """Whether :meth:`select` will probe the prompt, at ``0 < ratio < 1``. Everything before the question has to
        be computed before that."""
        return bool(self.asks_at(assembled, ratio))

    @abstractmethod
    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        """Tokens to recompute. ``0 < ratio < 1``: budget, as a share of layer-tokens, including probes."""


def choose(policy: Policy, assembled: AssembledPrompt, ratio: float) -> Selection:
    """The tokens that ``policy`` recomputes. It is not asked at ratio 0 (none) and at ratio 1 (all tokens)."""
    if ratio <= 0 or not assembled.chunk_tokens:
        return Selection()
    if ratio >= 1:
        return Selection(tuple(assembled.positions().tolist()))
    policy.check(assembled.num_layers)
    may_probe, before = policy.reads_content and policy.probes(assembled, ratio), assembled.charged
    selection = policy.select(assembled, ratio)
    if assembled.charged > before and not may_probe:
        raise KvmosaicError(
            f"policy {policy.name}: select probed the prompt without saying so; set reads_content = True, and let "
            "probes return True"
        )
    chosen = np.array(selection.positions, dtype=np.int64)
    if (np.diff(chosen) <= 0).any():
        raise KvmosaicError(f"policy {policy.name}: the positions that select returned are not ascending; sort them")
    outside = chosen[~np.isin(chosen, assembled.positions().numpy())]
    if len(outside):
        raise KvmosaicError(
            f"policy {policy.name}: select returned position {outside[0]}, which is in no chunk; take positions "
            "from assembled.positions()"
        )
    spent, rounding = assembled.charged_ratio(selection), 1 / assembled.chunk_tokens
    if policy.keeps_ratio and spent > ratio + rounding:
        raise KvmosaicError(
            f"policy {policy.name}: the positions that select returned, with its probes, cost {spent:.0%} of all "
            f"chunk tokens, and the ratio allows {ratio:.0%}; take at most assembled.affordable(ratio) positions"
        )
    return selection
