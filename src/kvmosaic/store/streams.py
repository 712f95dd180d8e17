"""Copies between GPU and host memory beside the GPU's other work, not in front of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_local = threading.local()


def record_event() -> torch.cuda.Event | None:
    """The point that the calling thread's GPU work has reached; ``None`` where no GPU is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def on_side_stream(after: torch.cuda.Event | None) -> Iterator[None]:
    """Copies made inside run on a stream of this thread's own, behind ``after``. All are done at the end,
    so what they read may be freed and what they wrote may be used by any stream."""
    if after is None:
        yield
        return
    # A new thread's current device is the first one, whichever this process works on.
    with torch.cuda.device(after.device):
        if not hasattr(_local, "stream"):
            _local.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(_local.stream):
            _local.stream.wait_event(after)
            yield
            _local.stream.synchronize()
