"""CacheBlend: the tokens whose K or V changes most when they see the whole prompt."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Check, KVPart, Policy, Selection
from kvmosaic.core.errors import ConfigError


@dataclass(frozen=True)
class KVDeviation(Policy):
    """Computes all tokens up to the first of the ``layers``, and chooses those that deviate most. At each further one
    of the ``layers`` the set shrinks by the factor ``shrink``."""

    name: ClassVar[str] = "kv-deviation"
    reads_content: ClassVar[bool] = True
    part: KVPart = "k"
    layers: tuple[Annotated[int, Field(ge=0)], ...] = (1,)
    shrink: Annotated[float, Field(ge=1, le=100)] = 2.0
    threshold: Annotated[float, Field(ge=0)] = 0.0
    """Minimum squared distance of chosen tokens, as a multiple of the mean."""
    unit: Literal["token", "document"] = "token"
    """``token``: single tokens. ``document``: whole chunks by mean distance, then the best run of the next one."""

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"kv-deviation: layers={self.layers} must be a non-empty ascending list")

    @property
    def chunk_layers(self) -> int:
        return self.layers[0] + 1

    @property
    def narrows(self) -> bool:
        return len(self.layers) > 1

    def check(self, num_layers: int) -> None:
        if self.layers[-1] >= num_layers - 1:
            raise ConfigError(f"kv-deviation: layer {self.layers[-1]} must be below the model's last layer")

    def probes(self, assembled: AssembledPrompt, ratio: float) -> bool:
        return (self.layers[0] + 1) / assembled.num_layers < ratio

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        if not self.probes(assembled, ratio):
            return Selection()  # the probe would cost the whole budget
        distance = assembled.deviation(self.layers[0], self.part).cpu()
        # Shrinking sets: the size of the first one is such that the total over all layers is what the ratio allows.
        bounds = [*(layer + 1 for layer in self.layers[1:]), assembled.num_layers]
        shares = [self.shrink ** (len(self.layers) - 1 - step) for step in range(len(self.layers))]
        cost = sum(share * (end - begin) for share, begin, end in zip(shares, [0, *bounds[:-1]], bounds, strict=True))
        unit = assembled.affordable(ratio, cost / assembled.num_layers)
        counts = [min(assembled.chunk_tokens, int(unit * share)) for share in shares]
        if self.unit == "document":
            chosen = whole_documents(distance, assembled, counts[0])
        else:
            chosen = torch.zeros(len(distance), dtype=torch.bool)
            chosen[distance.topk(counts[0]).indices] = True
        if self.threshold:
            chosen &= distance >= self.threshold * distance.mean()
        checks = tuple(Check(layer, keep, self.part) for layer, keep in zip(self.layers[1:], counts[1:], strict=True))
        return Selection(tuple(assembled.positions()[chosen].tolist()), checks)


def whole_documents(distance: torch.Tensor, assembled: AssembledPrompt, count: int) -> torch.Tensor:
    """``[chunk tokens]`` bool: ``count`` tokens, from the chunks with the highest mean distance. Of the last chunk,
    which does not fit as a whole, the run with the highest sum."""
    chosen = torch.zeros(len(distance), dtype=torch.bool)
    parts = torch.split(distance, assembled.lengths.tolist())
    starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
    for index in sorted(range(len(parts)), key=lambda index: -float(parts[index].mean())):
        length = min(count, len(parts[index]))
        if length == 0:
            break
        sums = torch.cat([torch.zeros(1, dtype=torch.float64), parts[index].double().cumsum(0)])
        best = int((sums[length:] - sums[:-length]).argmax())
        chosen[int(starts[index]) + best : int(starts[index]) + best + length] = True
        count -= length
    return chosen
