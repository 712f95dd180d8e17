"""Copies between GPU and host memory that run concurrently with the GPU's other work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_local = threading.local()


def record_event() -> torch.cuda.Event | None:
    """An event after the calling thread's GPU work so far; ``None`` if no GPU is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def on_side_stream(after: torch.cuda.Event | None) -> Iterator[None]:
    """Run the copies inside the block on this thread's own stream, after the event ``after``. All are complete at the
    end, so their sources may be freed and any stream may use their results."""
    if after is None:
        yield
        return
    # A new thread's current device is the first one, even if this process works on another.
    with torch.cuda.device(after.device):
        if not hasattr(_local, "stream"):
            _local.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(_local.stream):
            _local.stream.wait_event(after)
            yield
            _local.stream.synchronize()
