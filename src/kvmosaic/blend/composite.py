"""The default: the start of every chunk, the longer the more the question looks at the chunk."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Policy, Selection
from kvmosaic.blend.query_attention import middle_layers, question_scores
from kvmosaic.blend.sink_link import first_tokens


@dataclass(frozen=True)
class Composite(Policy):
    """A part ``link`` of the tokens goes to the first ones of every chunk, in equal shares. The others lengthen the
    starts of chunks by how much the question attends to each, raised to ``power``.

    Why starts: a recomputed token is as exact as what it sees, and from a chunk's start on it sees recomputed tokens
    alone. Runs in the middle of a chunk see reused ones before them; measured, they help less and can do harm."""

    name: ClassVar[str] = "composite"
    reads_content: ClassVar[bool] = True
    link: Annotated[float, Field(ge=0, le=1)] = 0.25
    power: Annotated[float, Field(ge=0, le=8)] = 2.0
    layers: Annotated[int, Field(ge=1, lt=2**31)] = 3
    asking: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The question is asked only where that costs at most this part of what may be spent; else chunks are alike."""

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        probed = middle_layers(assembled, self.layers)
        # A long question about short chunks: asking would cost more tokens than it is worth.
        if not probed or assembled.probe_share(probed[-1], ratio) > self.asking:
            chosen = first_tokens(assembled, assembled.affordable(ratio))
        else:
            scores = question_scores(assembled, probed)
            chosen = self._starts(scores, assembled, assembled.affordable(ratio))
        return Selection(tuple(assembled.positions()[chosen].tolist()))

    def _starts(self, scores: torch.Tensor, assembled: AssembledPrompt, count: int) -> torch.Tensor:
        """``[chunk tokens]`` bool: ``count`` tokens, by the scores ``[chunk tokens]`` of the chunks they are in."""
        lengths = torch.tensor([len(span) for span in assembled.prompt.chunks])
        chunk_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.cat([torch.arange(int(length)) for length in lengths])
        weight = torch.zeros(len(lengths)).index_add_(0, chunk_of, scores).pow(self.power)
        equal = int(self.link * count / len(lengths))
        share = equal + weight / weight.sum().clamp(min=1e-30) * (count - equal * len(lengths))
        taken = torch.minimum(share.long(), lengths)
        # What rounding and short chunks leave over goes to the chunks that are looked at most.
        for index in torch.argsort(weight, descending=True, stable=True).tolist():
            more = min(int(lengths[index] - taken[index]), count - int(taken.sum()))
            taken[index] += more
        return place < taken[chunk_of]
