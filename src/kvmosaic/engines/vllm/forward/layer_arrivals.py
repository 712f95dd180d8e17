"""KV on its way from host memory into the cache, layer by layer, while the GPU computes."""

from collections.abc import Iterator, Sequence

import torch

GROUPS = 8
"""Number of layer groups per transfer: computing can start when an eighth of the layers is there."""


class LayerArrivals:
    """A CUDA stream beside the engine's own, and an event for each layer that marks its arrival. A reader or writer
    of a layer has to wait for that event: on the GPU, in the order of the engine's stream."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """``caches``: the cache of each layer. If layers share a cache, all of them form one group, because the first
        layer then has to wait for the last."""
        groups = 1 if len({cache.data_ptr() for cache in caches}) < len(caches) else GROUPS
        layers, step = len(caches), -(-len(caches) // groups)
        self.groups = [range(start, min(start + step, layers)) for start in range(0, layers, step)]
        self._stream = torch.cuda.Stream(caches[0].device)
        self._due: dict[int, torch.cuda.Event] = {}
        """Events of layers that have not been waited for, by layer."""

    @property
    def is_pending(self) -> bool:
        """Whether some layer has not been waited for yet."""
        return bool(self._due)

    def follow(self, launches: Iterator[range]) -> torch.cuda.Event:
        """Run ``launches``, which yield layers, on the side stream, after all work that the engine's stream has by
        now. The returned event marks the end of the last launch."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for layers in launches:
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self._due.update(dict.fromkeys(layers, event))
        return event

    def wait(self, layer: int) -> None:
        """Make the engine's stream wait until a layer has arrived."""
        event = self._due.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait_for_all(self) -> None:
        """Make the engine's stream wait until all layers have arrived."""
        for layer in list(self._due):
            self.wait(layer)
