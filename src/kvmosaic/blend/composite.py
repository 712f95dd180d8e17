"""The default: the first tokens of every chunk, then tokens that the question attends to, preferably near those."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Policy, Selection
from kvmosaic.blend.query_attention import PROBED_LAYERS, check_layers, middle_layers
from kvmosaic.blend.sink_link import first_tokens
from kvmosaic.blend.spans import best_spans


@dataclass(frozen=True)
class Composite(Policy):
    """The ``first`` tokens of every chunk, and the runs of tokens that the question attends to most. Attention is
    measured at ``layers`` middle layers. At ``reach`` tokens from the start of a chunk, attention counts half.

    Tokens near the start count more, because they lack most of the text that they would have seen. The farther a
    token is from the start of its chunk, the more of the text that it attends to was there when it was computed."""

    name: ClassVar[str] = "composite"
    reads_content: ClassVar[bool] = True
    can_skip_probe: ClassVar[bool] = True
    first: Annotated[int, Field(ge=0, lt=2**31)] = 4
    reach: Annotated[float, Field(gt=0, le=1e9)] = 16.0
    runs: Annotated[int, Field(ge=1, lt=2**31)] = 256
    """Approximate maximum number of runs. Single tokens are better, but each run costs an attention call."""
    layers: Annotated[int, Field(ge=1, lt=2**31)] = PROBED_LAYERS
    asking: Annotated[float, Field(ge=0, le=1)] = 0.16
    """Maximum share of the budget for probing the question. If the probe costs more, the first tokens of chunks are
    chosen without it."""

    def check(self, num_layers: int) -> None:
        check_layers(self.name, self.layers, num_layers)

    def asks_at(self, assembled: AssembledPrompt, ratio: float) -> Sequence[int]:
        probed = middle_layers(assembled, self.layers)
        # With a long question about short chunks, the probe would cost more tokens than it is worth.
        is_worth_it = probed and assembled.asked and assembled.probe_share(probed[-1], ratio) <= self.asking
        return probed if is_worth_it else ()

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        layers = self.asks_at(assembled, ratio)
        if layers:
            scores = assembled.question_attention(layers).cpu()
            chosen = self._mosaic(scores, assembled, assembled.affordable(ratio))
        else:
            chosen = first_tokens(assembled, assembled.affordable(ratio))
        return Selection(tuple(assembled.positions()[chosen].tolist()))

    def _mosaic(self, scores: torch.Tensor, assembled: AssembledPrompt, count: int) -> torch.Tensor:
        """``[chunk tokens]`` bool: ``count`` tokens, by ``scores`` ``[chunk tokens]`` and their offsets in chunks."""
        chosen = first_tokens(assembled, count, self.first)
        place = torch.from_numpy(assembled.places)
        width = 2 ** math.ceil(math.log2(max(1.0, count / self.runs)))
        return best_spans(scores / (1 + place / self.reach), assembled, count, width, chosen)
