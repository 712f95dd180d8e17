"""Copies between accelerator and host memory that run concurrently with the accelerator's other work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvmosaic.core.accelerator import accelerator_in_use, accelerator_of

_local = threading.local()


def record_event() -> torch.cuda.Event | None:
    """An event after the calling thread's accelerator work so far; ``None`` if no accelerator is in use. Events of
    NPUs have the same methods."""
    module = accelerator_in_use()
    if module is None:
        return None
    event: torch.cuda.Event = module.Event()
    event.record()
    return event


@contextmanager
def on_side_stream(after: torch.cuda.Event | None) -> Iterator[None]:
    """Run the copies inside the block on this thread's own stream, after the event ``after``. All are complete at the
    end, so their sources may be freed and any stream may use their results."""
    if after is None:
        yield
        return
    module = accelerator_of(after.device)
    assert module is not None
    # A new thread's current device is the first one, even if this process works on another.
    with module.device(after.device):
        if not hasattr(_local, "stream"):
            _local.stream = module.Stream()
        with module.stream(_local.stream):
            _local.stream.wait_event(after)
            yield
            _local.stream.synchronize()
