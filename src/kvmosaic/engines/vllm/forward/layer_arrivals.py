"""KV on its way from host memory into the cache, layer by layer, while the GPU computes."""

from collections.abc import Iterator, Sequence

import torch

GROUPS = 8
"""Number of layer groups per transfer: computing can start when an eighth of the layers is there."""


class LayerArrivals:
    """A stream beside the engine's own, and for each layer when it will be there. A reader or writer of a layer has
    to wait for it: on the GPU, in the order of the engine's stream."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """``caches``: that of each layer. Where layers share one, the first has to wait for what the last brings."""
        groups = 1 if len({cache.data_ptr() for cache in caches}) < len(caches) else GROUPS
        layers, step = len(caches), -(-len(caches) // groups)
        self.groups = [range(start, min(start + step, layers)) for start in range(0, layers, step)]
        self._stream = torch.cuda.Stream(caches[0].device)
        self._due: dict[int, torch.cuda.Event] = {}
        """By layer."""

    @property
    def is_pending(self) -> bool:
        """Whether a layer has not been waited for yet."""
        return bool(self._due)

    def follow(self, launches: Iterator[range]) -> torch.cuda.Event:
        """Run ``launches``, which name layers, beside the engine's stream, after what that stream has by now. The
        event says when the last of them is over."""
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
