"""The tokens that the question attends to."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from kvmosaic.blend.base import AssembledPrompt, Policy, Selection
from kvmosaic.blend.spans import best_spans
from kvmosaic.core.errors import ConfigError

FIRST_PART, LAST_PART = 0.45, 0.75
"""Range of the middle layers, as parts of the depth: earlier ones look at words, later ones at the answer."""

PROBED_LAYERS = 3
"""Default number of middle layers that are probed; all of them if there are fewer."""


@dataclass(frozen=True)
class QueryAttention(Policy):
    """The runs of ``span`` tokens that the question attends to most, measured at ``layers`` middle layers."""

    name: ClassVar[str] = "query-attention"
    reads_content: ClassVar[bool] = True
    span: Annotated[int, Field(ge=1, lt=2**31)] = 16
    layers: Annotated[int, Field(ge=1, lt=2**31)] = PROBED_LAYERS

    def check(self, num_layers: int) -> None:
        check_layers(self.name, self.layers, num_layers)

    def asks_at(self, assembled: AssembledPrompt, ratio: float) -> Sequence[int]:
        probed = middle_layers(assembled, self.layers)
        return probed if probed and assembled.asked and assembled.probe_share(probed[-1], ratio) < 1 else ()

    def select(self, assembled: AssembledPrompt, ratio: float) -> Selection:
        layers = self.asks_at(assembled, ratio)
        if not layers:
            return Selection()  # the probe is impossible or would cost the whole budget
        scores = assembled.question_attention(layers)
        chosen = best_spans(scores, assembled, assembled.affordable(ratio), self.span)
        return Selection(tuple(assembled.positions()[chosen].tolist()))


def check_layers(name: str, wanted: int, num_layers: int) -> None:
    """Raise for more probed layers than the model has. The default number is allowed for any model."""
    if wanted > max(num_layers, PROBED_LAYERS):
        raise ConfigError(f"{name}: layers={wanted}: the model has only {num_layers} layers")


def middle_layers(assembled: AssembledPrompt, count: int) -> list[int]:
    """At most ``count`` middle layers with full attention, evenly spread. If there are none, the full layer nearest
    to the middle. Empty if the model has no layers with full attention."""
    if not assembled.full_layers:
        return []
    first, last = FIRST_PART * assembled.num_layers, LAST_PART * assembled.num_layers
    middle = [layer for layer in assembled.full_layers if first <= layer <= last]
    if not middle:
        return [min(assembled.full_layers, key=lambda layer: abs(layer - (first + last) / 2))]
    step = max(1.0, len(middle) / count)
    return [middle[int((index + 0.5) * step)] for index in range(min(count, len(middle)))]
