"""CacheBlend: tokens whose K or V changes most in sight of the whole prompt."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Check, KVPart, Policy, Selection
from kvmosaic.core.errors import ConfigError


@dataclass(frozen=True)
class KVDeviation(Policy):
    """All tokens are computed up to the first of the ``layers``, where those that deviate most are chosen. At each
    further layer fewer of them go on: ``shrink`` times as many as would be left if all layers had the same number."""

    name: ClassVar[str] = "kv-deviation"
    reads_content: ClassVar[bool] = True
    part: KVPart = "k"
    layers: tuple[Annotated[int, Field(ge=0)], ...] = (1,)
    shrink: Annotated[float, Field(ge=1, le=100)] = 2.0
    threshold: Annotated[float, Field(ge=0)] = 0.0
    """Choose only tokens whose squared distance is at least this many times the mean one."""
    unit: Literal["token", "document"] = "token"
    """``document``: whole chunks by their mean, then the best run of the next one."""

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"kv-deviation: layers={self.layers} must be ascending, and at least one")

    @property
    def chunk_layers(self) -> int:
        return self.layers[0] + 1

    @property
    def narrows(self) -> bool:
        return len(self.layers) > 1

    def check(self, num_layers: int) -> None:
        if self.layers[-1] >= num_layers - 1:
            raise ConfigError(f"kv-deviation: layer {self.layers[-1]} is not below the model's last one")

    def probes(self, assembled: AssembledPrompt, ratio: float) -> bool:
        return (self.layers[0] + 1) / assembled.num_layers < ratio

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        if not self.probes(assembled, ratio):
            return Selection()  # finding out would cost all there is to spend
        distance = assembled.deviation(self.layers[0], self.part).cpu()
        # Shrinking sets: the first is so large that all layers together cost what the ratio allows.
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
    """``[chunk tokens]`` bool: the chunks with the highest mean, one by one, and of the one that no longer fits the
    run that has most."""
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
