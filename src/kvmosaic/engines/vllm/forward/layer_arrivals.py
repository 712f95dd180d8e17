"""KV on its way from host memory into the cache, layer by layer, while the GPU computes."""

from collections.abc import Iterator

import torch

GROUPS = 8
"""So many times the bus is told what to bring next: computing can start when an eighth of the layers is there."""


class Arrivals:
    """A stream beside the engine's own, and for each layer when it will be there. Whoever reads or overwrites a layer
    has to wait for it: on the GPU, in the order of the engine's stream."""

    def __init__(self, device: torch.device, groups: int, layers: int) -> None:
        self._stream = torch.cuda.Stream(device)
        step = -(-layers // groups)
        self.groups = [range(start, min(start + step, layers)) for start in range(0, layers, step)]
        self._due: dict[int, torch.cuda.Event] = {}
        """By layer."""

    @property
    def pending(self) -> bool:
        """Whether anything has not been waited for yet."""
        return bool(self._due)

    def follow(self, launches: Iterator[range]) -> torch.cuda.Event:
        """Have ``launches``, which name layers, run beside the engine's stream, after what that has by now; when the
        last of them will be over."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for layers in launches:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._due.update(dict.fromkeys(layers, event))
        return event

    def wait(self, layer: int) -> None:
        """Let the engine's stream go on only when a layer is there."""
        event = self._due.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait_for_all(self) -> None:
        """Likewise for all layers."""
        for layer in list(self._due):
            self.wait(layer)
